"""Connections to ranks, workers and name resolution, and announcement of versions."""
