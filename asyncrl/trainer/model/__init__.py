"""A role's model: loading, LoRA, attention for packing, recomputed layers, the count of its operations, parity."""
