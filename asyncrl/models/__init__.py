"""Facts about transformers' models that both engines use, and the check that the engines agree with transformers.

Things that all processes with torch share are here too: the device that one computes on (`torch_device`), copies to its
host's memory (`host_copies`), and a group of ranks (`ranks`). `model_config`, `folder_checks` and `picture_rules` load
no torch.
"""
