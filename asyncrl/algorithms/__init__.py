"""Losses, advantage estimators, KL terms, filters: pure functions, registered by name. `grpo` has what the defaults
choose; of the others there is a file per kind.

Nothing here imports the rest of asyncrl. `registry` and `filters` do not import torch, so that the launcher can check a
configuration and RolloutWorkers can filter groups without it.

Shape suffixes: T = packed tokens of all sequences, S = sequences (samples), G = groups, V = vocabulary.
"""
