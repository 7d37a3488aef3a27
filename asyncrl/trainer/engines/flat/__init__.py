"""The flat engine: every rank has the whole model and trains its own samples; see `engine`."""
