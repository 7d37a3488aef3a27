"""Layouts of roles over ranks, and the `torch.distributed` world that they make."""
