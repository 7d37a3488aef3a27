"""Facts about transformers' models that both engines use, and the check that the engines agree with transformers.

`weights/` publishes, loads, sends and keeps the tensors of a model.
"""
