"""Training engines: `base` is what the rest asks of one, each other module one way to spread a model over ranks."""
