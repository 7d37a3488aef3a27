"""The built-in model functions, a few per file; `asyncrl.training.calls` says what one is."""
