"""Rows of metrics, statistics of evaluations, win rates, warnings about filters."""
