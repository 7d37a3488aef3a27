"""What the command line ends with."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
"""A setting is wrong; nothing was started."""
EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C after a checkpoint."""
