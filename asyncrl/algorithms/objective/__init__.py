"""The actor's objective and its terms: KL, corrections, selections, aggregations; a file per family."""
