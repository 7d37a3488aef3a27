"""The built-in model functions, a few per file; `asyncrl.trainer.calls` says what one is."""
