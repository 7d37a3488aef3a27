"""Faults on purpose: what can go wrong with a run is done to it, by a plan that a seed makes."""
