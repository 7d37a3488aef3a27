"""The built-in model functions, a few per file; `asyncrl.trainer.functions.calls` says what one is."""
