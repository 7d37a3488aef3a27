"""Connections to ranks, workers and name resolution, and the announcement of versions."""
