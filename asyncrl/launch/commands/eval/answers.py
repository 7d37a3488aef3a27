"""The answers of an evaluation as a JSON-lines file."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.evaluation_sets import evaluation_sets
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import ANSWERS_DIR, run_dir_of
from asyncrl.launch.refusal import refuse
from asyncrl.observe.samples import Row, answer_files, read_samples


def write_measured_answers(config: ExperimentConfig, out: Path, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Write the answers to the measured sets to `out`; return True if every answer was kept."""
    measured = {str(row["set"]): row for row in rows if "failed" not in row}
    written = write_answers(run_dir_of(config) / ANSWERS_DIR, out, list(measured))
    missing = False
    for each in evaluation_sets(config):
        if each.name not in measured:
            continue
        wanted = int(measured[each.name][f"eval/{each.name}/prompts"]) * each.n_samples
        if written[each.name] != wanted:
            missing = True
            refuse(f"{out} has {written[each.name]} of {wanted} answers to {each.name}")
    return not missing


def write_answers(folder: Path, out: Path, sets: Sequence[str]) -> Mapping[str, int]:
    """Write the answers saved in `folder` to `out`, for each of `sets` in the order of rows and members.

    Returns:
        The number of answers of each set.

    Raises:
        ValueError: a file is not a file of answers.
        OSError: `out` cannot be written.
    """
    files: defaultdict[str, list[Path]] = defaultdict(list)
    for file in answer_files(folder):
        files[file.parent.name].append(file)
    counts: Counter[str] = Counter()
    with out.open("w", encoding="utf-8") as lines:
        for name in sets:
            rows = sorted(read_samples(files[name]), key=lambda row: (row["order"], row["sample"]))
            counts[name] = len({(row["order"], row["episode"]) for row in rows})
            lines.writelines(json.dumps(_line(row), ensure_ascii=False) + "\n" for row in rows)
    return counts


def _line(row: Row) -> dict[str, Any]:
    """Return the line of a sample; an answer has several if its conversation was cut into several."""
    texts = [(part["generated"], part["text"]) for part in row["segments"]]
    first = next((number for number, (generated, _) in enumerate(texts) if generated), len(texts))
    return {
        "set": row["set"],
        "row": row["order"],
        "answer": row["episode"],
        "sample": row["sample"],
        "prompt": "".join(text for _, text in texts[:first]),
        "completion": "".join(text for _, text in texts[first:]),
        "reward": row["total_reward"],
        "reward_parts": row["reward_parts"],
        "right": row["right"],
        "generated_tokens": sum(row["loss_mask"]),
        "truncated": row["truncated"],
        "metrics": row["rollout_metrics"],
    }
