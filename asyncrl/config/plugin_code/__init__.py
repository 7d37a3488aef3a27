"""Code that settings name: import paths, the interfaces and parameters that it has, its state, its checksums."""
