"""Facts about transformers' models that both engines use, and the check that the engines agree with transformers.

`weights/` publishes, loads, sends and keeps the tensors of a model. Two things that all processes with torch share are
here too: the device that one computes on (`torch_device`), and a group of ranks (`ranks`).
"""
