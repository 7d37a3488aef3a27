"""A train step's batch: its columns, their exchange between ranks, and the cut into micro-batches."""
