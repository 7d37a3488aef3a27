"""Facts about transformers' models that both engines use, and the check that the engines agree with transformers."""
