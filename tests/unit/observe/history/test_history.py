"""A run as its files tell it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.comm.ended_rollouts import (
    Admitted,
    Begin,
    Dropped,
    Finished,
    Line,
    PromptFate,
    RolloutCounts,
    RunSettings,
    Step,
    Trained,
)
from asyncrl.observe.history import History, State

SETTINGS = RunSettings(2, 1, "drop", 1, 0)


def append(file: Path, *lines: Line | dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as stream:
        for line in lines:
            stream.write((json.dumps(line).encode() if isinstance(line, dict) else msgspec.json.encode(line)) + b"\n")


def begin(lineage: int = 0, version: int = 0, after: int = 0, at: float = 0.0) -> Begin:
    return Begin(
        lineage=lineage, version=version, after=after, settings=SETTINGS, carried=None, line=1, at=at, seal="0"
    )


def step_lines(step: int, at: float, ids: str, lineage: int = 0) -> list[Line]:
    lines: list[Line] = []
    for order, name in enumerate(ids):
        lines.append(Admitted(name, f"e0-{order}", order, 0, "rollout_worker/0", step - 1, at - 4))
        lines.append(Finished(name, 30, at - 1))
    for order, name in enumerate(ids):
        lines.append(Trained(name, f"e0-{order}", order, lineage, step, {step - 1: 20, step - 2: 10}, 2, 2, 0.5))
    return [*lines, Step(lineage=lineage, step=step, counts=RolloutCounts(), line=9, at=at, seal="0")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "mine" / "trial0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("total_train_steps: 3\nrollout:\n  max_concurrent: 4\n")
    return folder


def ledger(run: Path) -> Path:
    return run / "ledger" / "000001.jsonl"


def test_figures_of_a_step_come_from_its_rollouts(run: Path) -> None:
    append(ledger(run), begin(), *step_lines(1, 10.0, "ab"))
    history = History(run)
    step = history.steps[1]
    assert step.admitted == 2
    assert step.ages == {0: 40, 1: 20}
    assert (step.rollout_s, step.waited_s) == (3.0, 1.0)
    assert history.rollouts["a"].end == "trained"
    assert (history.rollouts["a"].step, history.rollouts["a"].reward) == (1, 0.5)


def test_what_is_new_is_taken_in_and_a_line_that_is_not_whole_waits(run: Path) -> None:
    append(ledger(run), begin(), *step_lines(1, 10.0, "ab"))
    history = History(run)
    whole = msgspec.json.encode(Admitted("c", "e0-2", 2, 0, "rollout_worker/0", 1, 11.0)) + b"\n"
    with ledger(run).open("ab") as stream:
        stream.write(whole[:20])
    history.refresh()
    assert "c" not in history.rollouts
    with ledger(run).open("ab") as stream:
        stream.write(whole[20:])
    append(ledger(run), *step_lines(2, 20.0, "de"))
    append(run / "ledger" / "000002.jsonl", *step_lines(3, 30.0, "fg"))
    history.refresh()
    assert history.rollouts["c"].end is None
    assert sorted(history.steps) == [1, 2, 3]
    assert history.steps[2].admitted == 3


def test_steps_that_a_launch_forgot_are_forgotten(run: Path) -> None:
    append(ledger(run), begin(), *step_lines(1, 10.0, "ab"))
    append(ledger(run), *step_lines(2, 20.0, "cd"), Admitted("e", "e0-4", 4, 0, "rollout_worker/0", 2, 21.0))
    append(ledger(run), begin(1, 1, 9, at=25.0))
    history = History(run)
    assert sorted(history.steps) == [1]
    assert history.rollouts["c"].end == "abandoned"
    assert history.rollouts["e"].end == "abandoned"
    append(ledger(run), *step_lines(2, 30.0, "xy", lineage=1))
    history.refresh()
    assert history.steps[2].at == 30.0


def test_a_rollout_that_a_later_lineage_adopts_began_when_it_was_admitted_first(run: Path) -> None:
    append(ledger(run), begin(), *step_lines(1, 10.0, "ab"))
    append(ledger(run), *(Admitted(name, f"e0-{name}", 7, 0, "rollout_worker/0", 1, 11.0) for name in "cd"))
    append(ledger(run), begin(1, 1, 7, at=25.0))
    adopted = Admitted("c", "e0-c", 7, 0, "rollout_worker/0", 1, 25.0, adopted=True)
    append(ledger(run), adopted, Admitted("d", "e0-8", 8, 0, "rollout_worker/0", 1, 26.0))
    append(ledger(run), Finished("c", 30, 27.0))
    rollouts = History(run).rollouts
    assert (rollouts["c"].admitted_at, rollouts["c"].finished_at, rollouts["c"].end) == (11.0, 27.0, None)
    assert (rollouts["d"].admitted_at, rollouts["d"].prompt) == (26.0, "e0-8"), "its first grant never came"


def test_a_ledger_that_was_cut_is_read_again(run: Path) -> None:
    append(ledger(run), begin(), *step_lines(1, 10.0, "ab"))
    size = ledger(run).stat().st_size
    append(ledger(run), *step_lines(2, 20.0, "cd"))
    history = History(run)
    with ledger(run).open("r+b") as stream:
        stream.truncate(size)
    history.refresh()
    assert sorted(history.steps) == [1]


def test_drops_are_counted_in_the_step_in_which_they_happen(run: Path) -> None:
    dropped = Dropped("z", "stale", PromptFate.returned, 5.0)
    append(ledger(run), begin(), dropped, *step_lines(1, 10.0, "ab"), *step_lines(2, 20.0, "cd"))
    history = History(run)
    assert history.steps[1].dropped == {"stale": 1}
    assert not history.steps[2].dropped


def test_rollouts_of_old_steps_are_let_go(run: Path) -> None:
    append(ledger(run), begin())
    for step in range(1, 11):
        append(ledger(run), *step_lines(step, 10.0 * step, f"{step}"))
    history = History(run, keep_steps=3)
    assert {rollout.step for rollout in history.rollouts.values()} <= {8, 9, 10}
    assert len(history.steps) == 10


def test_rows_that_are_trained_anew_replace_the_old_ones(run: Path) -> None:
    append(run / "metrics.jsonl", *({"step": step, "loss": step} for step in range(4)))
    history = History(run)
    assert sorted(history.rows) == [0, 1, 2, 3]
    (run / "metrics.jsonl").write_text('{"step": 0, "loss": 0}\n{"step": 1, "loss": 7}\n')
    history.refresh()
    assert {step: row["loss"] for step, row in history.rows.items()} == {0: 0, 1: 7}


@pytest.mark.parametrize(("steps", "state"), [(None, State.died), (2, State.stopped), (3, State.finished)])
def test_the_end_of_a_run_is_known_from_its_files(run: Path, steps: int | None, state: State) -> None:
    if steps is not None:
        (run / "summary.json").write_text(json.dumps({"steps": steps}))
    assert History(run).state is state


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no run: it has no config\.yaml"):
        History(tmp_path)


def test_settings_are_found_by_their_names(run: Path) -> None:
    history = History(run / "metrics.jsonl")
    assert history.setting("rollout.max_concurrent") == 4
    assert history.setting("rollout.nothing", 7) == 7


def test_settings_of_an_earlier_version_are_found_by_their_names_now(run: Path) -> None:
    (run / "config.yaml").write_text("checkpoint: {keep_last_step: false}")
    assert History(run).setting("checkpoint.in_memory") is False


def test_an_emptied_config_has_no_settings(run: Path) -> None:
    (run / "config.yaml").write_text("")
    assert History(run).setting("rollout.max_concurrent") is None
