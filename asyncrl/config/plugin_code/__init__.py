"""User code named in settings: import paths, interfaces, parameters, state and checksums."""
