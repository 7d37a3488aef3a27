"""Rows of metrics, statistics of evaluations, warnings about filters."""
