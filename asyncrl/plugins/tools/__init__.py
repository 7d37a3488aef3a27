"""Tools that a model may call, and the toolbox that runs a sample's calls."""
