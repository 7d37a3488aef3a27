"""Losses, advantage estimators, KL terms, filters: pure functions, registered by name.

Each policy loss and each advantage estimator has its own file. A family of short functions is one file: filters,
shaping, value losses, and in `objective/` KL terms, aggregations, corrections and selections.

Nothing here imports the rest of asyncrl. `spec`, `registry`, `filters` and `shaping` do not import torch, so that the
launcher can check a configuration and RolloutWorkers can filter groups without it.

Shape suffixes: T = packed tokens of all sequences, S = sequences (samples), G = groups, V = vocabulary.
"""
