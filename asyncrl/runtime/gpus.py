"""The GPUs of this machine, without importing torch."""

from __future__ import annotations

import os
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")


def count_gpus() -> int:
    """NVIDIA GPUs that a process started here sees: those that `CUDA_VISIBLE_DEVICES` leaves of the machine's."""
    installed = len(list(_DRIVER.glob("*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed
    return min(installed, len([name for name in visible.split(",") if name.strip()]))
