"""Audit of a run from its files alone. `docs/ledger.md` describes what it proves and what it cannot.

The audit shares no code with the run except the types of the ledger's lines, so an error in the run's code is not
repeated here. `ledger_files` reads the ledger, `rules` replays it, and `outcome` has the totals. The other files are
compared with these: in `documents` the small files, in `rows` the metrics, in `folders` checkpoints and weights, in
`kept` the samples.
"""
