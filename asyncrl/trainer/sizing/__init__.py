"""Sizes before anything starts: parameters and their cut, and the memory that a rank needs."""
