"""The experiment `embodied_srpo`: its task, and what comes with the package to start from."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from embodied_base import ENCODER, LAYOUTS, MOVES, POLICY, TASK, WORDS, State, held_out
from vlm_base import RECORD_FILE

from asyncrl.config.import_paths import load_plugin
from asyncrl.config.load import experiments_dir


def test_whoever_knows_the_way_succeeds_on_every_layout_and_comes_nearer_with_each_step() -> None:
    assert len(LAYOUTS) == 504
    for start in LAYOUTS:
        way = [start]
        while not way[-1].done:
            way.append(way[-1].after(way[-1].best))
        assert len(way) - 1 <= MOVES
        assert [state.progress for state in way] == sorted({state.progress for state in way})
    assert State(4, 4, 0).after("nonsense") == State(4, 4, 0)
    assert State(4, 4, 0, carries=True).after(".").done is False, "put down beside the frame"


def test_states_are_told_by_their_pictures_and_no_held_out_layout_is_trained_on() -> None:
    states = {after for start in LAYOUTS[::9] for word in WORDS for after in (start, start.after(word))}
    seen = {(state.gripper, state.square, state.goal, state.carries) for state in states}
    assert len({state.frame.tobytes() for state in states}) == len(seen)
    layouts = load_plugin(f"{TASK}:Layouts")
    train, other = (
        {layouts(split=split).row(n)["layout"] for n in range(len(layouts(split=split)))}
        for split in ("train", "held_out")
    )
    assert len(train) + len(other) == len(LAYOUTS)
    assert not train & other
    assert {number for number in range(len(LAYOUTS)) if held_out(number)} == other
    assert 100 < len(other) < 150


@pytest.mark.parametrize("name", [POLICY, ENCODER])
def test_the_package_has_the_models_as_they_were_made(name: str) -> None:
    """After a change to one: `python benchmarks/embodied_base.py`."""
    folder = experiments_dir() / "base_models" / name
    files = {file.name: file for file in folder.iterdir() if file.name != RECORD_FILE}
    record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    assert {name: sha256(file.read_bytes()).hexdigest() for name, file in files.items()} == record["sha256"]
    assert sum(file.stat().st_size for file in files.values()) < 1 << 20
    assert 0.05 < record.get("held_out_success", 0.1) < 0.2
