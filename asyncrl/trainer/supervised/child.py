"""The process that makes a base model, and its progress in the terminal of the launch that starts it.

    python -m asyncrl.trainer.supervised.child CONFIG.yaml OUT_DIR [RANK]

Without RANK the process is the first rank, which starts the others. Progress goes to standard output as JSON lines, the
rows of `metrics.jsonl`; notes on the data for the user are `{"note"}` lines.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from asyncrl.comm.typed import convert
from asyncrl.config.run_dir import CHECKPOINTS_DIR, plain_settings
from asyncrl.config.values import to_yaml
from asyncrl.trainer.supervised.settings import CHILD, SFTConfig, run_dir_of

PLAIN_LINE_EVERY = 100
"""Steps between two progress lines if the output is not a terminal."""


def make_in_child(config: SFTConfig, folder: Path) -> str | None:
    """Make the model of `config` in `folder`, with progress. Return why that failed; None if it did not."""
    config_file = folder.with_suffix(".yaml")
    config_file.write_text(to_yaml(plain_settings(config)), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", CHILD, str(config_file), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(config.threads)},
    )
    try:
        last_lines = _show_progress(process, f"base model {folder.name}")
    finally:
        process.terminate()
        code = process.wait()
        if code != 0:
            config_file.unlink()
            run_dir = run_dir_of(folder)
            if not any(run_dir.glob(f"{CHECKPOINTS_DIR}/*")):  # nothing to resume from
                shutil.rmtree(run_dir, ignore_errors=True)
    if code != 0:
        return f"the base model's training exited with {code}:\n" + "\n".join(last_lines)
    config_file.rename(folder / "sft.yaml")
    return None


def _show_progress(process: subprocess.Popen[str], title: str) -> list[str]:
    """Show the progress lines until the output ends; returns the last lines of other output."""
    console = Console(highlight=False)
    other: deque[str] = deque(maxlen=20)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} steps"))
    times = (TextColumn("loss {task.fields[loss]:.3f}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    assert process.stdout is not None
    with Progress(*columns, *times, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None, loss=float("nan"))
        for line in process.stdout:
            if line.startswith('{"note"'):
                console.print(json.loads(line)["note"], markup=False, soft_wrap=True)
                continue
            if not line.startswith('{"step"'):
                other.append(line.rstrip("\n"))
                continue
            row = json.loads(line)
            if (held_out := row["held_out_loss"]) is not None:
                measured = f"{title}: step {row['step']}/{row['total']}  held-out loss {held_out:.4f}"
                measured += "".join(
                    f"  {name} {row[key]:.3f}"
                    for name, key in (("accuracy", "held_out_accuracy"), ("margin", "held_out_margin"))
                    if key in row
                )
                console.print(measured, markup=False, soft_wrap=True)
            bar.update(task, total=row["total"], completed=row["step"], loss=row["loss"])
            if not console.is_terminal and row["step"] % PLAIN_LINE_EVERY == 0:
                text = f"{title}: step {row['step']}/{row['total']}  loss {row['loss']:.3f}  {row['eta_s']:.0f} s left"
                console.print(text, markup=False, soft_wrap=True)
    return list(other)


def main(config_file: Path, out_dir: Path, rank: int | None) -> None:
    """Make the model that the config describes, or one rank's part of it."""
    from asyncrl.trainer.supervised.supervised_loop import make_base_model, other_ranks  # with torch, unlike a launcher

    config = convert(yaml.safe_load(config_file.read_text(encoding="utf-8")), SFTConfig)
    if rank is not None:
        make_base_model(config, out_dir, rank=rank)
        return
    with other_ranks(config, sys.argv[1:3], run_dir_of(out_dir)):
        make_base_model(
            config, out_dir, progress=lambda step: _print(step.row()), note=lambda text: _print({"note": text})
        )


def _print(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
