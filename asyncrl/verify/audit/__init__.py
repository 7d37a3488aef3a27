"""Audit of a run from its files alone. `docs/ledger.md` says what it proves and what it cannot.

Nothing here decides anything in a run, and nothing that decides there is used here: only the types of the ledger's
lines are shared. `history` reads the ledger, `rules` replays it, `outcome` is what it came to, and `documents` (the
small files), `rows` (metrics), `folders` (checkpoints, weights) and `kept` (samples) hold the other files against that.
"""
