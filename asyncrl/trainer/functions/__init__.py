"""The built-in model functions, a few per file; `asyncrl.trainer.functions.model_functions` defines the term."""
