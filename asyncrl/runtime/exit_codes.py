"""What the command line ends with, and by which code a process tells the launcher what it takes to go on."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
"""A setting is wrong; nothing was started."""
EXIT_TOGETHER = 75
"""Of a process that cannot go on alone: all of the trainer's side have to begin again (`RestartTogether`)."""
EXIT_LOST = 255
"""Nobody can tell how a process on another host ended: the connection to it did, or never was. ssh's own choice."""
EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C after a checkpoint."""
