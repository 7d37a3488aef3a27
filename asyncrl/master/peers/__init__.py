"""Connections to ranks, workers and name resolution, announcement of versions, turns on shared devices."""
