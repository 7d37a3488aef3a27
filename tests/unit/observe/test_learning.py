"""Steps from which nothing can be learnt are said once, plainly, and counted in the summary."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.launch.train import summary_lines
from asyncrl.observe.display import LiveDisplay, PlainDisplay
from asyncrl.observe.metrics.learning import FlatSteps
from tests.unit.observe.test_display import ROW

ALL_RIGHT = {"reward/mean": 1.0, "reward/std": 0.0, "reward/frac_zero_std": 1.0, "advantage/abs_mean": 0.0}
EACH_GROUP = ALL_RIGHT | {"reward/mean": 0.5, "reward/std": 0.5}
LEARNT = {"reward/mean": 0.5, "reward/std": 0.5, "reward/frac_zero_std": 0.5, "advantage/abs_mean": 0.4}


def warnings(*rows: dict[str, Any]) -> list[str]:
    flat = FlatSteps()
    return [warning for row in rows if (warning := flat.take(row)) is not None]


def test_rewards_that_are_all_the_same_are_warned_of_once() -> None:
    (warning,) = warnings(*[ALL_RIGHT] * 10)
    assert warning.startswith(
        "WARNING: the rewards of the last 3 steps are all 1, so nothing is learnt from them; look"
    )
    (warning,) = warnings(LEARNT, *[EACH_GROUP] * 5, LEARNT, *[ALL_RIGHT] * 5)
    assert "are equal within each group" in warning


@pytest.mark.parametrize(
    "row",
    [
        LEARNT,
        EACH_GROUP | {"advantage/abs_mean": 0.3},  # of a critic, or of groups of one against a running mean
        {"step": 0, "eval/held_out/accuracy": 0.0},
    ],
)
def test_steps_that_teach_something_are_not_warned_of(row: dict[str, Any]) -> None:
    assert warnings(*[row] * 10) == []
    assert warnings(*[ALL_RIGHT, ALL_RIGHT, LEARNT] * 4) == [], "a small batch may be all right by chance"


def test_constant_rewards_are_warned_of_whatever_a_critic_makes_of_them() -> None:
    (warning,) = warnings(*[ALL_RIGHT | {"advantage/abs_mean": 0.3}] * 10)
    assert "are all 1" in warning


@pytest.mark.parametrize("live", [False, True])
def test_both_displays_say_it(live: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=False)
    display = LiveDisplay(console, "asyncrl a/b", 10, 4) if live else PlainDisplay(console, 10)
    for _ in range(5):
        display.row(ROW | ALL_RIGHT)
    display.close()
    assert out.getvalue().count("WARNING") == 1


def test_the_summary_counts_such_steps(tmp_path: Path) -> None:
    def reported(*rows: dict[str, Any]) -> list[str]:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [line for line in summary_lines(tmp_path) if line.startswith("NO SIGNAL")]

    assert reported(LEARNT, LEARNT) == []
    (line,) = reported(*[ALL_RIGHT] * 3, LEARNT)
    assert "nothing was learnt from 3 of 4 steps: all their rewards were equal; look at" in line
    (line,) = reported(EACH_GROUP, LEARNT, LEARNT)
    assert "nothing was learnt from 1 of 3 steps: all rewards of each group were equal; their prompts" in line
