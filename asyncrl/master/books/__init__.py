"""The record of a run: reports to the manager, the ledger, the files of the run."""
