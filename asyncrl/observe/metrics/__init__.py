"""Metrics of a run: their table, sinks, text for Prometheus, a board for Grafana, samples as tables."""
