"""Audit of a run from its files alone. `docs/ledger.md` describes what it proves and what it cannot.

The audit shares no code with the run except the types of the ledger's lines, so an error in the run's code is not
repeated here. `history` reads the ledger, `rules` replays it, `outcome` has the totals, and `documents` (the small
files), `rows` (metrics), `folders` (checkpoints, weights) and `kept` (samples) compare the other files with them.
"""
