"""Audit of a run from its files alone. `docs/ledger.md` describes what it proves and what it cannot.

The audit shares no rule with the run, so an error in the run's code is not repeated here: only the names and types of
what is in the files, and the readers of complete lines and of checksums. `ledger_files` reads the ledger,
`ledger_rules` replays it, and `outcome` has the totals. The other files are compared with these: in `run_files` the
small files and the folders of checkpoints and weights, in `tables` the metrics and the samples.
"""
