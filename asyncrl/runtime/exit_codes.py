"""Exit codes of the command line, and those by which a process tells the launcher what to restart."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
"""A setting is wrong; nothing was started."""
EXIT_HELD = 4
"""Another run holds the trial; nothing was started. The same command works once that run has ended."""
EXIT_STATE_LOST = 75
"""The last step is lost: the whole run must begin again with its newest checkpoint. Raised as `StateLost`."""
EXIT_LOST = 255
"""The process is lost, and its end is not known: the connection to its host ended or never existed, or the process
found that another one has taken its name. ssh uses the same code.
"""
EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C after a checkpoint."""
