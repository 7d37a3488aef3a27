"""The rollout counts, and the prompts that are used: what the manager and the loop tell each other."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.setting import ChoiceConfig
from asyncrl.data.prompt_queue import NextTry, UsedPrompts
from asyncrl.manager import messages as m
from asyncrl.master.data.sample_buffer import CountsError
from asyncrl.master.peers import Stalled
from tests.integration.master.fakes import (
    FakeWorkers,
    Run,
    check_history,
    make_config,
    running,
    until,
)


async def test_a_rollout_unaccounted_for_fails_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=1))
    run.manager.lost = 1
    await run.deliver(range(6))
    with pytest.raises(CountsError, match="submitted 6, trained 4"):
        await run.loop.run()


async def test_what_workers_dropped_for_good_is_used_and_never_comes_again(tmp_path: Path) -> None:
    first = Run(tmp_path, make_config(total_train_steps=4, checkpoint__interval=2))
    await first.deliver(range(12), oldest=1)
    first.manager.give_up("e0-20", "filter: zero_variance")
    async with running(first) as task:  # killed in step 4
        await until(lambda: first.workers.saved() == [2])
        first.manager.give_up("e0-21", "failed")
        await until(lambda: first.loop.run_state.version == 3)
        task.cancel()

    second = Run(tmp_path, make_config(total_train_steps=4), FakeWorkers(stored=first.workers.stored))
    async with running(second):
        await until(lambda: second.begun == 1)
    assert second.manager.used == {"e0-20", *(f"e0-{order}" for order in range(8))}, "of e0-21 no checkpoint knows"


async def test_what_was_dropped_before_the_checkpoint_stays_in_the_counts(tmp_path: Path) -> None:
    first = Run(tmp_path, make_config(total_train_steps=4, checkpoint__interval=1))
    await first.deliver(range(4), oldest=0)
    for prompt in ("e0-20", "e0-21"):
        first.manager.give_up(prompt, "filter: zero_variance")
    async with running(first) as task:
        await until(lambda: first.workers.saved() == [1])
        task.cancel()

    config = make_config(total_train_steps=2, rollout__filters=[ChoiceConfig("zero_variance")])
    second = Run(tmp_path, config, FakeWorkers(stored=first.workers.stored))
    async with running(second) as task:
        await until(lambda: second.manager.reported is not None)
        assert second.manager.reported is not None
        assert second.manager.reported.checkpoint.dropped == {"filter: zero_variance": 2}
        known = json.loads((tmp_path / "books.json").read_text())
        assert known["step"] == 1
        assert (known["books"]["submitted"], known["books"]["dropped"]) == (6, {"filter: zero_variance": 2})
        await second.deliver(range(4, 8), oldest=1)
        await task
    assert second.rows()[-1]["filter/dropped_groups"] == 0, "what the first launch dropped is in no row of the second"
    assert second.summary()["books"]["dropped"] == {"filter: zero_variance": 2}


@pytest.mark.parametrize("end", ["stop", "failure"])
async def test_the_checkpoint_that_a_run_leaves_has_exactly_the_used_prompts_of_its_step(
    tmp_path: Path, end: str
) -> None:
    """One that was begun with the step is not written again."""
    for interval in (0, 1):
        folder = tmp_path / str(interval)
        folder.mkdir()
        run = Run(folder, make_config(checkpoint__interval=interval))
        if end == "failure":
            run.workers.on_train = lambda: setattr(run.loop.stall, "limit_s", 0.05)  # noqa: B023 - for the next
        await run.deliver(range(4))
        run.manager.give_up("e0-20")
        async with running(run) as task:
            await until(lambda: run.loop.checkpoints.saved == interval and run.loop.run_state.recorded == 1)  # noqa: B023
            run.manager.give_up("e0-21")
            if end == "stop":
                run.stop.set()
                await task
            else:
                with pytest.raises(Stalled):
                    await task
        assert run.workers.saved() == [1]
        assert stored_prompts(run) == {"e0-20", *(f"e0-{order}" for order in range(4))}
        assert run.workers.stored is not None
        assert run.workers.stored["gate"]["dropped"] == {"failed": 1}
        if end == "stop":
            assert run.summary()["books"]["dropped"] == {"failed": 2}, (
                "the rollout counts have what came after the step"
            )


async def test_a_resumed_run_tries_again_what_was_dropped_after_the_last_step_with_the_tries_of_the_step(
    tmp_path: Path,
) -> None:
    first = Run(tmp_path, make_config(total_train_steps=2))
    manager = first.manager

    def fails(rollout_id: str, *, as_next_attempt: bool) -> None:
        manager.admit(rollout_id, 8)
        end = m.FinishedRollout(rollout_id, False, "failed", return_prompt=True, as_next_attempt=as_next_attempt)
        manager.service.rollouts.finish(end)

    await first.deliver(range(7))
    manager.once_begun(lambda: manager.admit("r7", 7))
    manager.once_begun(lambda: fails("before", as_next_attempt=False))
    async with running(first) as task:
        await until(lambda: first.loop.run_state.recorded == 1)
        fails("after", as_next_attempt=True)
        manager.give_up("e0-9")
        assert (manager.service.rollouts.queue.waiting(8), "e0-9" in manager.used) == (NextTry(8, 1, 0), True)
        first.stop.set()
        await task

    second = Run(tmp_path, first.config, FakeWorkers(stored=first.workers.stored))
    async with running(second) as task:
        await until(lambda: second.begun == 1)
        assert second.manager.service.rollouts.queue.waiting(8) == NextTry(8, 0, 1)
        assert "e0-9" not in second.manager.used
        await second.deliver(range(4, 8), oldest=1, tag="second")
        await task
    assert second.summary()["books"]["dropped"] == {"failed": 1}
    check_history(tmp_path, steps=2)


def stored_prompts(run: Run) -> set[str]:
    """Return the prompts that the newest checkpoint has as used."""
    assert run.workers.stored is not None
    return set(UsedPrompts.from_json(run.workers.stored["gate"]["used"]))


async def test_a_rollout_that_expires_leaves_the_gate_while_the_step_waits(tmp_path: Path) -> None:
    """It takes up room that the rollouts which the step lacks may need."""
    run = Run(tmp_path, make_config())
    await run.deliver(range(8), oldest=1)
    async with running(run):
        await until(lambda: len(run.manager.reports) == 2)
        run.manager.give_up("e0-20")
        await run.deliver([8], oldest=0)
        await until(lambda: run.manager.dropped.get("stale") == 1)
        assert run.loop.run_state.version == 2
        await until(lambda: run.workers.discarded == ["r8"])
    assert "e0-20" in run.manager.used
    assert "e0-8" not in run.manager.used
    assert len(run.loop.run_state.buffer) == 0


async def test_a_stale_rollouts_prompt_is_not_used_but_a_filtered_group_of_the_batch_is(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=3))
    run.workers.filtered_in_graph = 2.0
    await run.deliver(range(8), oldest=1)
    async with running(run) as task:
        await until(lambda: run.loop.run_state.version == 2)
        await run.deliver(range(8, 9), oldest=0, tag="late")
        await run.deliver(range(9, 13), oldest=2)
        await task
    assert run.manager.used == {f"e0-{order}" for order in range(13) if order != 8}


async def test_the_last_known_counts_are_on_disk_from_the_beginning_and_after_every_step(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())

    def known() -> tuple[int, dict[str, Any]]:
        value = json.loads((tmp_path / "books.json").read_text())
        return value["step"], value["books"]

    async with running(run):
        await until(lambda: run.begun == 1)
        assert known() == (0, run_counts(0, 0))
        await run.deliver(range(7))
        await until(lambda: len(run.rows()) == 1 and known()[0] == 1)
        assert known() == (1, run_counts(7, 4) | {"finished_untrained": 3})


def run_counts(submitted: int, trained: int) -> dict[str, Any]:
    return {"dropped": {}, "abandoned": 0, "running": 0, "finished_untrained": 0} | {
        "submitted": submitted,
        "trained": trained,
    }


async def test_measured_success_is_part_of_a_checkpoint_and_of_the_curriculum_when_the_run_goes_on(
    tmp_path: Path,
) -> None:
    config = make_config(total_train_steps=1, checkpoint__interval=1)
    config.dataset.curriculum.high = 0.8
    first = Run(tmp_path, config)
    await first.deliver(range(4))
    first.manager.measure("r1", 1.0)
    first.manager.measure("r2", 0.5)
    await first.loop.run()
    assert first.workers.stored is not None
    assert first.workers.stored["gate"]["curriculum"] == [[1, 0, 1.0], [2, 0, 0.5]]

    config = dataclasses.replace(config, total_train_steps=2)
    second = Run(tmp_path, config, FakeWorkers(stored=first.workers.stored))
    await second.deliver(range(4, 8), oldest=1)
    await second.loop.run()
    curriculum = second.manager.service.rollouts.curriculum
    assert curriculum is not None
    assert [curriculum.skips(prompt) for prompt in ("e1-1", "e1-2")] == [True, False]
