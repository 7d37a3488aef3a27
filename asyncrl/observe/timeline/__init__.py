"""Timeline of a run: rollouts and their workers, phases of the trainer, weight updates of the servers.

`spans` makes the same list for the trace (`chrome`), the picture (`svg`) and the dashboard.
"""

from asyncrl.observe.timeline.spans import Arrow, Span, Timeline, timeline

__all__ = ["Arrow", "Span", "Timeline", "timeline"]
