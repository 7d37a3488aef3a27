"""The doctor: why a run is as fast as it is, what is wrong with it, and what to set.

One set of rules for the command `doctor RUN`, the terminal's line, the stall message and the dashboard's banner. It
reads a `History`, so it judges live, finished and dead runs alike, from their files alone.
"""

from asyncrl.observe.doctor.diagnosis import Diagnosis, examine
from asyncrl.observe.doctor.finding import Finding, Level

__all__ = ["Diagnosis", "Finding", "Level", "examine"]
