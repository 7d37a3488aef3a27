"""A GenerationServer that dies is started again alone; the run finishes by itself, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow

BATCH = 4


def check_the_end(run: Any, steps: int, restarts: dict[str, int]) -> None:
    """The run finished by itself, each step is there once, the books balance, the restarts are told everywhere."""
    assert run.wait(180) == 0, run.output + run.logs()
    rows = run.rows()
    assert [row["step"] for row in rows if row["step"]] == list(range(1, steps + 1))
    summary = run.summary()
    assert summary["restarts"] == restarts
    assert rows[-1]["restarts"] == sum(restarts.values())
    assert run.output.count("it is started again") == sum(restarts.values())
    assert "restarts   " + ", ".join(f"{what} {count}" for what, count in restarts.items()) in run.output
    assert "FAILED" not in run.output
    books = summary["books"]
    assert books["submitted"] == books["trained"] + sum(books["dropped"].values()) + books["abandoned"]
    assert books["trained"] == steps * BATCH
    assert run.survivors() == []


def test_a_killed_generation_server_is_started_again_and_serves_the_newest_weights(start_run: Any) -> None:
    """The only one, so that every request has to wait for it."""
    steps = 12
    run = start_run(total_train_steps=steps)
    run.wait_for_step(3)
    run.worker("generation_server/0").kill()
    check_the_end(run, steps, {"generation_server/0": 1})
    rows = run.rows()
    assert max(row["staleness/max"] for row in rows if "staleness/max" in row) <= 2
    log = (run.run_dir / "logs" / "gserver_manager-0.log").read_text()
    again = log[log.rindex("generation server 0 is at") :]
    assert "with version 0" in again
    assert "generation server 0 serves v" in again, log
