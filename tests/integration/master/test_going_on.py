"""A loop that goes on: from a checkpoint, or from the last step."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm.request_reply import Failure, PeerGone, RemoteError
from asyncrl.comm.typed import convert
from asyncrl.manager.messages import CloseGate, Done
from asyncrl.master.data import sample_buffer
from asyncrl.master.data.sample_buffer import CountsError
from asyncrl.runtime.process.worker import StateLost
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.runtime.trials.resume import newest_progress
from asyncrl.trainer.messages import (
    MEMORY_CHECKPOINT_LOST,
    CollectWeights,
    FinishShare,
    LoadCheckpoint,
    LoadMemoryCheckpoint,
    Publish,
)
from asyncrl.verify.audit.run_files import MasterState
from tests.integration.master.fakes import (
    FakeWorkers,
    Run,
    check_history,
    kill,
    make_config,
    rollout,
    running,
    until,
)


async def test_a_stop_request_ends_the_wait_with_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    await run.deliver(range(5))
    async with running(run) as task:
        await until(lambda: run.loop.run_state.version == 1)
        run.stop.set()
        await task
    assert run.workers.saved() == [1]
    assert run.summary()["steps"] == 1
    assert run.summary()["books"]["abandoned"] == 1
    state: dict[str, Any] = {"roles": {"actor": {}}, "master_state": run.workers.stored}
    (tmp_path / "checkpoints" / "v1" / "state.json").write_text(json.dumps(state))
    progress, master = newest_progress(tmp_path), convert(run.workers.stored, MasterState)
    assert progress is not None
    reported = progress.version, progress.used_prompts, progress.ledger_lines
    assert reported == (1, 4, master.gate.line), "as the launcher reads it"
    assert master.gate.used.ids() == {f"e0-{order}" for order in range(4)}, "as the audit reads it"


async def test_a_stop_request_lets_the_step_under_way_finish(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    run.workers.train_gate = asyncio.Event()
    run.workers.on_train = run.stop.set
    await run.deliver(range(8))
    async with running(run) as task:
        await until(run.stop.is_set)
        run.workers.train_gate.set()
        await task
    assert run.loop.run_state.version == 1
    assert run.workers.saved() == [1]


async def test_a_stop_request_in_the_last_step_ends_as_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, make_config(total_train_steps=1))
    run.workers.on_train = run.stop.set
    close = run.manager.close_gate

    async def after_the_request_was_seen(request: CloseGate) -> Done:
        for _ in range(10):
            await asyncio.sleep(0)
        return await close(request)

    monkeypatch.setattr(run.manager, "close_gate", after_the_request_was_seen)
    await run.deliver(range(4))
    async with running(run) as task:
        await task
    assert run.workers.saved() == [1]
    assert run.summary()["steps"] == 1


async def test_a_resumed_run_trains_nothing_twice_and_has_every_row_once(tmp_path: Path) -> None:
    first = Run(tmp_path, make_config(total_train_steps=4, checkpoint__interval=2))
    await first.deliver(range(12), oldest=1)
    async with running(first) as task:  # killed in step 4, one step after the checkpoint
        await until(lambda: first.loop.run_state.version == 3)
        task.cancel()
    stored = first.workers.stored
    assert stored is not None

    second = Run(tmp_path, make_config(total_train_steps=4), FakeWorkers(stored=stored))
    async with running(second) as task:
        await until(lambda: second.begun == 1)
        assert second.manager.used == {f"e0-{order}" for order in range(8)}, "the manager plays the others"
        assert second.board.versions == [2]
        await second.deliver(range(8, 16), oldest=3, tag="second")
        await task
    assert second.workers.trained_rollouts() == [f"second{order}" for order in range(8, 16)]
    first_asked = next(request for _, request in second.workers.log if isinstance(request, CollectWeights | Publish))
    assert first_asked == CollectWeights("actor", (2,))  # version 3 was of a forgotten step
    assert [row["step"] for row in second.rows()] == [1, 2, 3, 4]
    assert second.summary()["books"]["trained"] == 16


async def test_a_run_that_was_stopped_before_its_first_step_begins_anew(tmp_path: Path) -> None:
    config = make_config(total_train_steps=1, eval__interval=1)
    first = Run(tmp_path, config)
    first.rollouts.finish = asyncio.Event()
    async with running(first) as task:
        await until(lambda: first.rollouts.started == [0])
        first.stop.set()
        await task
    assert [row["step"] for row in first.rows()] == [0]
    assert (first.rows()[0]["eval/held_out/cut_short"], "eval/held_out/failed" in first.rows()[0]) == (1.0, False)
    assert first.summary()["evaluations_failed"] == [
        {"version": 0, "set": "held_out", "reason": "cut short by the end of the run"}
    ]

    assert (first.workers.saved(), newest_progress(tmp_path)) == ([], None), "there is nothing to go on from"

    second = Run(tmp_path, config)
    await second.deliver(range(4))
    await second.loop.run()
    assert [(row["step"], row["eval/held_out/accuracy"]) for row in second.rows()] == [(0, 0.5), (1, 0.5)]
    assert second.summary()["evaluations_failed"] == []


async def test_a_run_that_is_stopped_before_its_gate_opens_has_nothing_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at its beginning nor where it is resumed."""
    monkeypatch.setattr(sample_buffer, "ANSWER_S", 0.05)
    whole = Run(tmp_path, make_config(total_train_steps=1))
    await whole.deliver(range(4))
    await whole.loop.run()
    for stored in (None, whole.workers.stored):
        run = Run(tmp_path, make_config(), FakeWorkers(stored=stored))
        run.manager.silent = True
        run.stop.set()
        with pytest.raises(CountsError):
            await run.loop.run()
        assert run.workers.saved() == []


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_brain_that_follows_goes_on_with_the_last_step(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint, ranks: int
) -> None:
    """No checkpoint is loaded, what waited in the ranks is trained, every row is there once."""
    first = Run(tmp_path, make_config(total_train_steps=4), FakeWorkers(ranks), memory_checkpoint=memory_checkpoint)
    async with running(first):  # killed while it waits for the data of step 3, of which a half is there
        await first.deliver(range(8), oldest=1)
        await first.deliver(range(8, 10), oldest=2)
        await until(lambda: first.loop.run_state.recorded == 2)
    asked = len(first.workers.log)

    second = Run(tmp_path, first.config, follows=first)
    async with running(second) as task:
        await until(lambda: second.begun == 1)
        await second.deliver(range(10, 16), oldest=2)
        await task
    asked_again = {type(request) for _, request in second.workers.log[asked:]}
    assert LoadMemoryCheckpoint in asked_again
    assert LoadCheckpoint not in asked_again
    assert second.workers.trained_rollouts() == [f"r{order}" for order in range(16)]
    assert [row["step"] for row in second.rows()] == [1, 2, 3, 4]
    assert second.board.versions == [1, 2, 2, 3, 4]
    assert second.summary()["books"]["trained"] == 16
    lines = [json.loads(line) for line in (tmp_path / "ledger" / "000001.jsonl").read_text().splitlines()]
    assert [line["rollout"] for line in lines if line["kind"] == "trained"] == second.workers.trained_rollouts()
    first_line, second_line = (line for line in lines if line["kind"] == "begin")
    assert (first_line["version"], second_line["version"]) == (0, 2)
    after = lines[second_line["after"] - 1]
    assert (after["kind"], after["step"]) == ("step", 2)
    adopted = [line["rollout"] for line in lines if line["kind"] == "admitted" and line.get("adopted")]
    assert adopted == ["r8", "r9"], "the ranks had them"


@pytest.mark.parametrize("dropped", ["before the last step", "after it"])
async def test_a_brain_that_follows_knows_what_was_dropped_for_good_up_to_the_last_step(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint, dropped: str
) -> None:
    """Of what happened after the step nobody but the manager had heard: that prompt is tried again."""
    first = Run(tmp_path, make_config(total_train_steps=2), memory_checkpoint=memory_checkpoint)
    if dropped == "before the last step":
        first.manager.give_up("e0-20")
    async with running(first):
        await first.deliver(range(6), oldest=1)
        await until(lambda: first.loop.run_state.recorded == 1)
        if dropped == "after it":
            first.manager.give_up("e0-20")

    second, known = Run(tmp_path, first.config, follows=first), list[bool]()
    second.workers.on_train = lambda: known.append("e0-20" in second.manager.used)
    async with running(second) as task:
        await second.deliver(range(6, 8), oldest=1)
        await task
    assert known == [dropped == "before the last step"]
    assert second.workers.trained_rollouts() == [f"r{order}" for order in range(8)]
    assert second.summary()["books"]["dropped"] == ({"failed": 1} if known[0] else {})


@pytest.mark.parametrize("lost", ["before the last step", "after it"])
async def test_what_the_new_manager_does_not_count_is_freed_before_a_brain_that_follows_trains(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint, lost: str
) -> None:
    """A given-up worker delivered it, and the brain died before the ranks had freed it. Its prompt was played again.

    If the worker was given up after the last step, nobody knows that any more: the first of the two counts.
    """
    first = Run(tmp_path, make_config(total_train_steps=2), memory_checkpoint=memory_checkpoint)
    if lost == "before the last step":
        first.manager.lose(4)
    async with running(first):
        await first.deliver(range(4), oldest=1)
        await until(lambda: first.loop.run_state.recorded == 1)
        if lost == "after it":
            first.manager.lose(4)
    await first.workers.deliver(rollout(4, 1))
    await first.deliver(range(4, 8), oldest=1, tag="again")

    second = Run(tmp_path, first.config, follows=first)
    await second.loop.run()
    assert second.manager.reported is not None
    assert "r4" in [each.rollout_id for each in second.manager.reported.received], (
        "as long as nobody has said so, it waits"
    )
    counts, does_not = ("again4", "r4") if lost == "before the last step" else ("r4", "again4")
    assert second.workers.discarded == [does_not]
    assert second.workers.trained_rollouts()[4:] == [counts, "again5", "again6", "again7"]
    assert second.summary()["books"]["dropped"] == ({"worker_died": 1} if counts == "again4" else {})


async def test_a_step_whose_state_was_not_whole_is_trained_again(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint
) -> None:
    """The brain was killed after the ranks had copied it; nobody had heard of the step."""
    first = Run(tmp_path, make_config(total_train_steps=2), memory_checkpoint=memory_checkpoint)
    first.workers.write_gate = asyncio.Event()
    async with running(first):
        await first.deliver(range(8), oldest=0)
        await until(lambda: bool(first.workers.requests(FinishShare)))
    assert (first.board.versions, memory_checkpoint.version) == ([], None)
    assert first.workers.trained_rollouts() == ["r0", "r1", "r2", "r3"]
    first.workers.write_gate.set()
    first.workers.log.clear()
    lines = [json.loads(line) for line in (tmp_path / "ledger" / "000001.jsonl").read_text().splitlines()]
    assert lines[-1]["kind"] == "step", "the ledger has it, and the next lineage begins before it"

    second = Run(tmp_path, first.config, follows=first)
    await second.loop.run()
    assert second.workers.trained_rollouts() == [f"r{order}" for order in range(8)]
    assert second.board.versions == [1, 2]
    assert [row["step"] for row in second.rows()] == [1, 2]
    assert second.summary()["books"]["trained"] == 8
    begins = [json.loads(line) for line in (tmp_path / "ledger" / "000001.jsonl").read_text().splitlines()]
    assert [line["after"] for line in begins if line["kind"] == "begin"] == [0, 0]


async def test_a_checkpoint_from_before_a_death_of_the_brain_is_gone_on_with_after_it(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint
) -> None:
    """The brain went on after the same step; what was dropped for good since then is tried again, both times."""
    first = Run(tmp_path, make_config(checkpoint__interval=1), memory_checkpoint=memory_checkpoint)
    await first.deliver(range(6), oldest=0)
    async with running(first):
        await until(lambda: first.workers.saved() == [1, 1])  # in memory and on disk
        first.manager.give_up("e0-6")
    stored = first.workers.stored

    second = Run(tmp_path, make_config(checkpoint__interval=0), follows=first)
    async with running(second):
        await second.deliver(range(6, 8), oldest=1)
        await until(lambda: second.loop.run_state.recorded == 2)
        assert "r6" in second.workers.trained_rollouts()

    third = Run(tmp_path, make_config(), FakeWorkers(stored=stored))
    await third.deliver(range(4, 12), oldest=1, tag="third")
    await third.loop.run()
    assert third.summary()["books"]["dropped"] == {}
    assert [row["step"] for row in third.rows()] == [1, 2, 3]
    check_history(tmp_path, steps=3)


@pytest.mark.parametrize("is_evaluated", [True, False])
@pytest.mark.parametrize("is_announced", [True, False])
async def test_the_row_of_a_step_that_its_master_did_not_write_is_written_by_the_next(
    tmp_path: Path,
    memory_checkpoint: MemoryCheckpoint,
    required_metrics: set[str],
    is_announced: bool,
    is_evaluated: bool,
) -> None:
    """Its state is whole; whether its version was announced or not, its evaluation is still due."""
    config = make_config(total_train_steps=3, eval__interval=2 if is_evaluated else 0)
    first = Run(tmp_path, config, memory_checkpoint=memory_checkpoint)
    announcer, reached = first.loop.announcer, asyncio.Event()
    announce = announcer.published

    async def announce_and_wait(version: int, path: str) -> None:
        if version == 2:
            first.rollouts.finish = asyncio.Event()
            first.loop._record = lambda batch, measured: None  # type: ignore[method-assign]
        if version < 2 or is_announced:
            await announce(version, path)
        if version == 2:
            reached.set()
            await asyncio.Event().wait()

    announcer.published = announce_and_wait  # type: ignore[method-assign]
    await first.deliver(range(8), oldest=1)
    async with running(first):
        await reached.wait()
        kill(first)
    written = [row["step"] for row in first.rows()]
    assert written == ([0, 1] if is_evaluated else [1])
    assert (2 in first.board.versions) == is_announced

    first.rollouts.finish, evaluated = None, len(first.rollouts.started)
    second = Run(tmp_path, config, follows=first)
    async with running(second) as task:
        await until(lambda: len(second.rows()) == len(written) + 1)
        assert second.rows()[-1]["policy_version"] == 2
        assert second.rows()[-1].keys() >= required_metrics
        await second.deliver(range(8, 12), oldest=2)
        await task
    rows = {row["step"]: row for row in second.rows()}
    assert len(rows) == len(second.rows())
    assert list(rows) == [*written, 2, 3]
    assert second.rollouts.started[evaluated:] == ([2, 3] if is_evaluated else [])
    assert ("eval/held_out/accuracy" in rows[2]) == is_evaluated
    assert second.summary()["evaluations_failed"] == []


@pytest.mark.parametrize("left", ["nothing", "an older version", "a part"])
async def test_where_the_last_step_is_not_whole_nobody_begins_with_what_is_left(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint, left: str
) -> None:
    """As after the loss of a host."""
    workers = FakeWorkers(kept={"version": 1} if left == "an older version" else None)
    if left == "a part":
        lost = Failure(MEMORY_CHECKPOINT_LOST, "version 2 is not whole any more: all of it on b", "")
        workers.fail[LoadMemoryCheckpoint] = RemoteError("model_worker/0", "load_memory_checkpoint", lost)
    run = Run(tmp_path, make_config(), workers, memory_checkpoint=memory_checkpoint)
    run.board.versions = [2]
    with pytest.raises(StateLost, match="only a checkpoint is left"):
        await run.loop.run()
    assert not memory_checkpoint.can_resume(0)
    assert not workers.requests(LoadCheckpoint)
    assert not workers.requests(Publish)


@pytest.mark.parametrize("cause", ["no room", "a rank died"])
async def test_a_step_that_is_not_kept_is_told_to_others_only_if_the_ranks_live(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint, cause: str
) -> None:
    """After a rank's death the run resumes from the step before; without room nothing resumes from there."""
    first = Run(tmp_path, make_config(total_train_steps=4), FakeWorkers(2), memory_checkpoint=memory_checkpoint)
    first.workers.fail[FinishShare] = (
        PeerGone("killed")
        if cause == "a rank died"
        else RemoteError("model_worker/1", "finish_share", Failure("OSError", "no room", "of many lines"))
    )
    async with running(first) as task:
        await first.deliver(range(4), oldest=0)
        if cause == "a rank died":
            with pytest.raises(PeerGone):
                await task
        else:
            await until(lambda: bool(first.board.versions))
    assert first.board.versions == ([] if cause == "a rank died" else [1])
    assert [row["step"] for row in first.rows()] == first.board.versions, "else a step has a row that is trained again"
    assert first.workers.saved() == []
    if cause == "no room":
        message = json.loads((tmp_path / "remarks.jsonl").read_text())["remark"]
        assert message.startswith(
            "WARNING: in-memory checkpoints are now off: no room. A crash of the trainer would cost"
        )


async def test_the_users_order_goes_on_over_a_restart_as_if_there_had_been_none(tmp_path: Path) -> None:
    """Rollouts that the order put back were not trained: their prompts are rolled out again and ranked as before."""
    (tmp_path / "mine.py").write_text("def last_first(rollout):\n    return -rollout.order\n")
    config = make_config(total_train_steps=3, checkpoint__interval=1, max_head_offpolicyness=2)
    config.buffer.order.path = f"{tmp_path / 'mine.py'}:last_first"
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = Run(tmp_path / "whole", config)
    await whole.deliver(range(12))
    await whole.loop.run()
    assert [row["rollout/order_failed"] for row in whole.rows()] == [0.0, 0.0, 0.0]

    first = Run(tmp_path / "cut", dataclasses.replace(config, total_train_steps=1))
    await first.deliver(range(12))
    await first.loop.run()
    second = Run(tmp_path / "cut", config, FakeWorkers(stored=first.workers.stored))
    await second.deliver([order for order in range(12) if f"r{order}" not in first.workers.trained_rollouts()])
    await second.loop.run()
    assert whole.workers.trained_rollouts() == [*first.workers.trained_rollouts(), *second.workers.trained_rollouts()]
    assert {name for name in whole.workers.trained_rollouts()[:4]} == {"r8", "r9", "r10", "r11"}
