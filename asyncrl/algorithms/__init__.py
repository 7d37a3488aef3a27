"""Losses, advantage estimators, KL terms, filters: pure functions, one short file each, registered by name.

Nothing here imports the rest of asyncrl. `spec`, `registry`, `filters` and `shaping` do not import torch, so that the
launcher can check a configuration and RolloutWorkers can filter groups without it.

Shape suffixes: T = packed tokens of all sequences, S = sequences (samples), G = groups, V = vocabulary.
"""
