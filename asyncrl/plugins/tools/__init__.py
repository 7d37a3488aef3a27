"""Tools that a model may call, and what carries a sample's calls to them: see `toolbox`."""
