"""Rows of metrics, evaluations, win rates."""
