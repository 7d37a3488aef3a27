"""Facts about transformers' models that both engines use, the check that the engines agree with transformers, and, in
`weights/`, what publishes, loads, sends and keeps the tensors of a model."""
