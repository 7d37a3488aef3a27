"""The process of a supervised experiment: `python -m asyncrl.trainer.supervised CONFIG.yaml OUT_DIR [RANK]`.

Without RANK the process is the first rank, which starts the others. Progress goes to standard output as JSON lines, the
rows of `metrics.jsonl`; notes on the data for the user are `{"note"}` lines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from asyncrl.comm.typed import convert
from asyncrl.trainer.supervised.base_model import run_dir_of
from asyncrl.trainer.supervised.settings import SFTConfig
from asyncrl.trainer.supervised.supervised_loop import make_base_model, other_ranks


def main(config_file: Path, out_dir: Path, rank: int | None) -> None:
    """Make the model that the config describes, or one rank's part of it."""
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
