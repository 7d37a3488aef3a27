"""Runs without trainers or without rollouts, and evaluation alone."""
