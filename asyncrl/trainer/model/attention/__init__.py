"""Attention functions that training adds to transformers' own, a file each."""
