"""User code named in settings: import paths, interfaces, parameters, state, threads and checksums."""
