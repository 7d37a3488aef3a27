"""Exit codes of the command line, and those by which a process tells the launcher what to restart."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
"""A setting is wrong; nothing was started."""
EXIT_HELD = 4
"""Another run holds the trial; nothing was started. Once that one has ended the same command works."""
EXIT_RESTART_TRAINER = 75
"""The whole trainer's side must restart, since this process cannot continue alone (`RestartTrainer`)."""
EXIT_LOST = 255
"""Nobody can tell how a process on another host ended: the connection to it did, or never was. ssh's own choice."""
EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C after a checkpoint."""
