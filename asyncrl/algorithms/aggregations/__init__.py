"""Aggregations: `(mask_T, seq_ids_T, num_seqs, *, params) -> Aggregation`, token weights and their denominator."""
