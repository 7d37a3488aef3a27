"""A run in time: which rollout ran where, what the trainer did, when servers loaded weights.

`spans` makes the same list for the trace (`chrome`), the picture (`svg`) and the dashboard.
"""

from asyncrl.observe.timeline.spans import Arrow, Span, Timeline, timeline

__all__ = ["Arrow", "Span", "Timeline", "timeline"]
