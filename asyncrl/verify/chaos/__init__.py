"""Deliberate faults: a run is subjected to the faults of a plan that is made from a seed."""
