"""The doctor: explains a run's speed, finds its problems, and suggests settings.

One set of rules serves the command `doctor RUN`, the terminal's line, the stall message and the dashboard's banner. The
rules read a `History`, so they work on live, finished and dead runs alike, from their files alone.
"""

from asyncrl.observe.doctor.diagnosis import Diagnosis, examine
from asyncrl.observe.doctor.finding import Finding, Level

__all__ = ["Diagnosis", "Finding", "Level", "examine"]
