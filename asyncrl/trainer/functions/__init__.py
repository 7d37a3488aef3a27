"""The built-in model functions, a few per file; `asyncrl.trainer.functions.calls` defines the term."""
