"""Audit of a run from its files alone. `docs/ledger.md` describes what it proves and what it cannot.

The audit shares no rule with the run, so an error in the run's code is not repeated here: only the names and types of
what is in the files, and the readers of complete lines and of checksums. `ledger_files` reads the ledger, `rules`
replays it, and `outcome` has the totals. The other files are compared with these: in `documents` the small files, in
`rows` the metrics, in `folders` checkpoints and weights, in `kept` the samples.
"""
