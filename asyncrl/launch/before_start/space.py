"""The check, before a run starts, that the disk has enough free space."""

from __future__ import annotations

import shutil
from pathlib import Path

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import run_dir_of

CHECKPOINT_TIMES_MODEL = 6
"""A checkpoint holds float32 weights and two moments, 12 bytes a parameter; a model's file in bfloat16 has 2."""
MODEL_FILES = ("*.safetensors", "*.bin")
_MIB, _GIB = 1 << 20, 1 << 30


def space_needed(config: ExperimentConfig) -> int:
    """Return the most bytes that the run's checkpoints and weights take, estimated from the model's files.

    These are `checkpoint.keep` checkpoints and the one being written, and three versions of the weights.
    """
    folder = Path(str(config.model.path))
    model = sum(file.stat().st_size for pattern in MODEL_FILES for file in folder.glob(pattern))
    checkpoints = config.checkpoint.keep + 1 if config.checkpoint.interval or config.checkpoint.interval_minutes else 1
    return model * (checkpoints * CHECKPOINT_TIMES_MODEL + 3)


def space_line(config: ExperimentConfig) -> tuple[bool, str]:
    """Return whether the disk of the run's folder has enough space, and a line with the figures."""
    folder = run_dir_of(config)
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free, needed = shutil.disk_usage(existing).free, space_needed(config)
    wanted = f"{needed / _GIB:.1f} GiB" if needed >= _GIB else f"{needed / _MIB:.0f} MiB"
    figures = f"{free / _GIB:.1f} GiB free at {existing}, about {wanted} needed"
    if free >= needed:
        return True, figures
    return False, f"fileroot={config.fileroot}: {figures}; choose another fileroot, or a smaller checkpoint.keep"
