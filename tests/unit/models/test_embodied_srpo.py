"""The experiment `embodied_srpo`: its task, and what comes with the package to start from."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "experiments" / "recipes"))

from embodied_srpo_base import ENCODER, LAYOUTS, MOVES, POLICY, TASK, WORDS, State, held_out
from vlm_shapes_base import RECORD_FILE

from asyncrl.config.plugin_code.import_paths import load_plugin


def test_whoever_knows_the_way_succeeds_on_every_layout_and_never_falls_back() -> None:
    assert len(LAYOUTS) == 504
    for start in LAYOUTS:
        way = [start]
        while not way[-1].done:
            way.append(way[-1].after(way[-1].best))
        assert len(way) - 1 <= MOVES
        progress = [state.progress for state in way]
        assert progress == sorted(progress)
        assert (progress[0], progress[-1], len(set(progress))) == (0.0, 1.0, 4)
    one = State(4, frozenset({0, 4}))
    assert one.after("nonsense") == one
    assert one.after(".") == State(4, frozenset({0}))
    assert one.after("up").after("left").after(".") == State(0, frozenset({4}))


def test_states_are_told_by_their_pictures_and_no_held_out_layout_is_trained_on() -> None:
    states = {after for start in LAYOUTS[::3] for word in WORDS for after in (start, start.after(word))}
    assert len({state.frame.tobytes() for state in states}) == len(states) > 200
    layouts = load_plugin(f"{TASK}:Layouts")
    train, other = (
        {layouts(split=split).row(n)["layout"] for n in range(len(layouts(split=split)))}
        for split in ("train", "held_out")
    )
    assert len(train) + len(other) == len(LAYOUTS)
    assert not train & other
    assert {number for number in range(len(LAYOUTS)) if held_out(number)} == other
    assert 100 < len(other) < 150


@pytest.mark.parametrize("folder", [POLICY, ENCODER], ids=lambda folder: folder.name)
def test_the_package_has_the_models_as_they_were_made(folder: Path) -> None:
    """After a change to one: `python experiments/recipes/embodied_srpo_base.py`."""
    files = {file.name: file for file in folder.iterdir() if file.name != RECORD_FILE}
    record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    assert {name: sha256(file.read_bytes()).hexdigest() for name, file in files.items()} == record["sha256"]
    assert sum(file.stat().st_size for file in files.values()) < 1 << 20
    assert 0.05 < record.get("held_out_success", 0.1) < 0.2
    assert record.get("progress_correlation", 1.0) > 0.7
