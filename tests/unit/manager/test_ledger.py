"""The ledger has every end of a rollout once, and a lineage continues after the line of its checkpoint."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from asyncrl.comm.ended_rollouts import (
    Abandoned,
    Admitted,
    Begin,
    Dropped,
    End,
    Finished,
    Line,
    PolicyTokens,
    PromptFate,
    RolloutCounts,
    RolloutLine,
    RunSettings,
    Step,
    Trained,
)
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.messages import GateCheckpoint, TrainedRollout
from asyncrl.manager.rollouts import ledger_files as ledger_module
from asyncrl.manager.rollouts.ledger_files import lines_in
from asyncrl.manager.rollouts.rollout_state import Ledger
from asyncrl.master.data.sample_buffer import trained_rollout
from asyncrl.master.settings import OnStale
from asyncrl.trainer.messages import RolloutRecord
from asyncrl.verify.audit.ledger_files import Entry, read_ledger, surviving
from tests.unit.comm.test_recent_ids import items

SETTINGS = RunSettings(train_batch_size=2, max_head_offpolicyness=1, on_stale="drop", workers=1, seed=0)
COUNTS = RolloutCounts()
WORKER = "rollout_worker/0"


def new_ledger(folder: Path, file_bytes: int = 1 << 20) -> Ledger:
    return Ledger(folder, SETTINGS, now=lambda: 1.23456, file_bytes=file_bytes)


def begun(folder: Path, version: int = 0, line: int = 0, file_bytes: int = 1 << 20) -> tuple[Ledger, dict[str, str]]:
    """A ledger that continues after `line`, and the rollouts that had ended by then."""
    ledger = new_ledger(folder, file_bytes)
    return ledger, dict(items(ledger.begin(version, GateCheckpoint(line=line))))


def admitted(order: int) -> Admitted:
    return Admitted(f"r{order}", f"e0-{order}", order, 0, WORKER, 0, 1.0)


def dropped(order: int, reason: str, prompt: PromptFate = PromptFate.given_up) -> Dropped:
    return Dropped(f"r{order}", reason, prompt, 1.0)


def trained(order: int) -> TrainedRollout:
    return TrainedRollout(f"r{order}", f"e0-{order}", order, {0: 3}, 1, 1, 1.0)


def add(ledger: Ledger, *lines: RolloutLine) -> None:
    for line in lines:
        ledger.add(line)


def lines(folder: Path) -> list[Line]:
    """The lines in the files as they are now."""
    return [msgspec.json.decode(line, type=Line) for line in lines_in(folder)]


def counting(folder: Path) -> list[Entry]:
    """The lines that count; no seal or number may be wrong."""
    findings: list[str] = []

    def report(place: str, what: str) -> None:
        findings.append(f"{place}: {what}")

    entries = list(surviving(read_ledger(folder, report), report))
    assert findings == []
    return entries


def damage(folder: Path, before: bytes, after: bytes) -> None:
    file = folder / "000001.jsonl"
    assert before in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(before, after))


# The lines.


def test_a_rollout_that_is_trained_is_recorded_with_what_made_it(tmp_path: Path) -> None:
    """Two episodes, one of two samples; the judge's sample trains another policy, and a third policy was asked too."""
    metrics = {"rollout/generated/actor": 12.0, "rollout/generated/judge": 4.0, "rollout/generated/idle": 3.0}
    metrics |= {
        "policy_server/past/oldest_version": 2.0,
        "policy_server/past/newest_version": 5.0,
        "policy_server/past/version": 3.5,
    }
    record = RolloutRecord(
        *("r1", "e0-1", 1, 0, 3, {3: 2, 4: 9}, (9, 9, 9), (5, 4, 2), (1.0, 0.0, 0.25), (False,) * 3, (0, 0, 1)),
        metrics=metrics,
        groups=("", "judge/0", "solver"),
    )
    ledger, _ = begun(tmp_path)
    records = (record, msgspec.structs.replace(record, metrics={}, groups=()))
    ledger.step(5, map(trained_rollout, records), RolloutCounts(2, 2))
    ledger.close()
    _, line, plain, step = lines(tmp_path)
    assert isinstance(line, Trained)
    assert (line.rollout, line.prompt, line.order, line.lineage, line.step) == ("r1", "e0-1", 1, 0, 5)
    assert (line.versions, line.episodes, line.samples, line.reward) == ({3: 2, 4: 9}, 2, 3, 0.375)
    assert line.policy_servers == {"past": (2, 5)}
    assert line.policies == {
        "actor": PolicyTokens(12, 7, 2),
        "judge": PolicyTokens(4, 4, 1),
        "idle": PolicyTokens(3, 0, 0),
    }
    assert isinstance(plain, Trained)
    assert (plain.policy_servers, plain.policies) == ({}, {})
    assert isinstance(step, Step)
    assert (step.step, step.counts) == (5, RolloutCounts(2, 2))


def test_the_ledger_of_a_run_has_the_settings_by_which_it_is_judged(tmp_path: Path) -> None:
    config = ExperimentConfig(train_batch_size=3, max_head_offpolicyness=2, seed=9, on_stale=OnStale.mask)
    config.rollout.workers = 4
    config.dataset.shuffle = False
    for replay, workers in (("", 4), ("kept", 0)):
        config.samples.replay = replay
        ledger = Ledger.of_run(tmp_path / f"run{workers}", config)
        ledger.begin(0, GateCheckpoint())
        ledger.close()
        (line,) = lines(tmp_path / f"run{workers}" / "ledger")
        assert isinstance(line, Begin)
        assert line.settings == RunSettings(3, 2, "mask", workers, 9, shuffle=False)


# The files.


async def test_each_line_is_in_the_file_once_written_returns_and_a_checkpoint_names_the_last(tmp_path: Path) -> None:
    """It outlives the process from then on."""
    ledger, _ = begun(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: ledger.add(admitted(0)),
        lambda: ledger.step(1, [], RolloutCounts(3, 2, {"stale": 1})),
        lambda: ledger.end(1, COUNTS),
    ]
    for number, call in enumerate(calls, 2):
        call()
        assert ledger.lines == number
        await ledger.written()
        *_, line = found = lines(tmp_path)
        assert len(found) == number
        assert getattr(line, "line", number) == number
        assert getattr(line, "at", 1.235) in (1.0, 1.235), "in milliseconds"
    ledger.close()
    assert [type(entry.line) for entry in counting(tmp_path)] == [Begin, Admitted, Step, End]


def test_what_was_not_written_is_written_as_the_process_ends(tmp_path: Path) -> None:
    ledger, _ = begun(tmp_path)
    add(ledger, admitted(0), admitted(1))
    assert len(lines(tmp_path)) == 1
    ledger.close()
    assert len(lines(tmp_path)) == 3


def test_a_full_file_is_followed_by_another_after_a_seal_only(tmp_path: Path) -> None:
    """A reader may check the seals of a file as soon as there is a later one."""
    ledger, _ = begun(tmp_path, file_bytes=400)
    for order in range(6):
        ledger.add(admitted(order))
        asyncio.run(ledger.written())
    assert len(list(tmp_path.iterdir())) == 1
    for step in (1, 2):
        ledger.step(step, [], COUNTS)
        ledger.add(admitted(7))
        asyncio.run(ledger.written())
    ledger.close()
    first, second = [[json.loads(line)["kind"] for line in file.open()] for file in sorted(tmp_path.iterdir())]
    assert first == ["begin", *["admitted"] * 6, "step"]
    assert second == ["admitted", "step", "admitted"]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors that were synced."""
    found, sync = list[int](), os.fdatasync

    def noted(descriptor: int) -> None:
        sync(descriptor)
        found.append(descriptor)

    monkeypatch.setattr(os, "fdatasync", noted)
    return found


async def test_what_a_state_continues_after_is_on_the_disk_as_written_returns(
    tmp_path: Path, synced: list[int]
) -> None:
    ledger, _ = begun(tmp_path)
    assert len(synced) == 1, "nothing else may count before the lineage has begun"
    calls: list[Callable[[], None]] = [
        lambda: ledger.step(1, [], COUNTS),
        lambda: ledger.end(1, COUNTS),
    ]
    for sealed in calls:
        before = len(synced)
        add(ledger, admitted(0))
        await ledger.written()
        assert len(synced) == before, "a line about a rollout alone may be lost"
        sealed()
        await ledger.written()
        assert len(synced) == before + 1
    add(ledger, admitted(0))
    ledger.close()
    assert len(synced) == 4


async def test_whoever_waits_for_the_lines_waits_for_the_sync_that_was_begun_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, _ = begun(tmp_path)
    ready, sync = threading.Event(), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (ready.wait(), sync(descriptor)))
    ledger.step(1, [], COUNTS)
    written = asyncio.create_task(ledger.written())
    await asyncio.wait({written}, timeout=0.05)
    assert not written.done(), "the event loop goes on meanwhile"
    ready.set()
    await written
    assert len(lines(tmp_path)) == 2
    ledger.close()


async def test_no_line_is_lost_with_whoever_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller hangs up, or the process is stopped, while the disk is slow."""
    ledger, _ = begun(tmp_path)
    ready, sync = threading.Event(), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (ready.wait(), sync(descriptor)))
    ledger.step(1, [], COUNTS)
    ledger.add(admitted(0))
    waiting = asyncio.create_task(ledger.written())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    ready.set()
    ledger.add(admitted(1))
    ledger.close()
    assert [type(entry.line) for entry in counting(tmp_path)] == [Begin, Step, Admitted, Admitted]


@pytest.mark.parametrize("call", ["step", "end"])
@pytest.mark.parametrize("error", [OSError(errno.ENODEV, "No such device"), MemoryError("No such device")], ids=repr)
async def test_after_a_sync_in_the_background_has_failed_nothing_is_written_any_more(
    tmp_path: Path, call: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for a line has the error, also where the disk would take it by then."""
    ledger, _ = begun(tmp_path)

    def broken(descriptor: int) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        ledger.step(1, [], COUNTS) if call == "step" else ledger.end(1, COUNTS)
        with pytest.raises(type(error), match="No such device"):
            await ledger.written()
    found = lines(tmp_path)
    add(ledger, admitted(0))
    for _ in range(2):
        with pytest.raises(type(error), match="No such device"):
            await ledger.written()
    with pytest.raises(type(error), match="No such device"):
        ledger.close()
    assert lines(tmp_path) == found


# A lineage.


def test_a_run_that_begins_or_goes_on_carries_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = begun(tmp_path)
    first.step(1, [], COUNTS)
    line = first.lines
    first.close()
    second, _ = begun(tmp_path, 1, line)
    second.close()
    begins = [entry.line for entry in counting(tmp_path) if isinstance(entry.line, Begin)]
    assert [(each.lineage, each.version, each.after, each.carried) for each in begins] == [
        (0, 0, 0, None),
        (1, 1, 2, None),
    ]
    assert not caplog.records


@pytest.mark.parametrize(
    ("version", "line", "lines_left"),
    [(2, 0, 0), (2, 0, 3), (2, 3, 0), (2, 4, 3), (0, 3, 0)],
    ids=["no line", "no line of a ledger", "no ledger", "an older ledger", "no ledger, before the first step"],
)
def test_a_run_whose_history_is_gone_carries_its_counters(
    tmp_path: Path, version: int, line: int, lines_left: int, caplog: pytest.LogCaptureFixture
) -> None:
    if lines_left:
        first, _ = begun(tmp_path)
        add(first, admitted(0), dropped(0, "failed"))
        assert first.lines == lines_left
        first.close()
    ledger = new_ledger(tmp_path)
    ended = ledger.begin(version, GateCheckpoint(line=line, dropped={"stale": 1, "timeout": 0}))
    begin = lines(tmp_path)[-1]
    assert isinstance(begin, Begin)
    assert (begin.after, begin.line) == (0, lines_left + 1)
    assert begin.carried == RolloutCounts(2 * version + 1, 2 * version, {"stale": 1})
    assert len(ended) == 0
    assert f"does not reach to the checkpoint of version {version}; the earlier history is lost" in caplog.text
    ledger.close()


def test_a_ledger_that_is_damaged_is_not_gone_on_with_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger, _ = begun(tmp_path)
    add(ledger, admitted(0), dropped(0, "failed"), admitted(1), dropped(1, "timeout"))
    ledger.step(1, [], COUNTS)
    line = ledger.lines
    ledger.close()
    damage(tmp_path, b'"reason":"timeout"', b'"reason":x')
    resumed = new_ledger(tmp_path)
    ended = resumed.begin(2, GateCheckpoint(line=line, dropped={"stale": 1}))
    assert len(ended) == 0, "no end of a history that does not count"
    assert "earlier history is lost" in caplog.text
    begin = msgspec.json.decode(list(lines_in(tmp_path))[-1], type=Begin)
    assert (begin.lineage, begin.after, begin.carried) == (1, 0, RolloutCounts(5, 4, {"stale": 1}))
    resumed.close()


@pytest.mark.parametrize("file_bytes", [1 << 20, 300], ids=["one file", "several files"])
def test_a_lineage_knows_the_ends_up_to_its_checkpoint_and_none_that_was_ruled_out(
    tmp_path: Path, file_bytes: int
) -> None:
    first, _ = begun(tmp_path, file_bytes=file_bytes)
    add(first, *map(admitted, range(4)), dropped(0, "too_hard", PromptFate.returned), Finished("r1", 3, 1.0))
    first.step(1, [], COUNTS)
    line = first.lines
    add(first, dropped(1, "stale", PromptFate.returned))
    first.close()
    second, ended = begun(tmp_path, 1, line, file_bytes)
    assert ended == {"r0": "too_hard"}
    add(second, admitted(4), Abandoned("r2", 1.0), dropped(4, "failed"))
    second.step(2, [trained(1), trained(3)], COUNTS)
    line = second.lines
    add(second, admitted(5), dropped(5, "failed"))
    second.close()
    assert (len(list(tmp_path.iterdir())) > 1) == (file_bytes == 300)

    third, ended = begun(tmp_path, 2, line, file_bytes)
    assert ended == {"r0": "too_hard", "r2": "abandoned", "r4": "failed", "r1": "trained", "r3": "trained"}
    assert (second.lineage, third.lineage) == (1, 2)
    third.close()
    begins = [entry.line for entry in counting(tmp_path) if isinstance(entry.line, Begin)]
    assert [(each.lineage, each.version) for each in begins] == [(0, 0), (1, 1), (2, 2)]


def test_a_run_that_begins_anew_knows_no_end(tmp_path: Path) -> None:
    """It died before its first step; its rollouts are live where a worker holds them."""
    first, _ = begun(tmp_path)
    add(first, admitted(0), dropped(0, "failed"))
    first.close()
    second, ended = begun(tmp_path)
    second.close()
    assert (second.lineage, ended) == (1, {})
    (entry,) = counting(tmp_path)
    assert isinstance(entry.line, Begin)
    assert (entry.line.lineage, entry.line.line, entry.line.carried) == (1, 4, None)


def test_what_came_after_the_step_that_a_brain_continues_from_counts_no_more(tmp_path: Path) -> None:
    ledger, _ = begun(tmp_path)
    add(ledger, admitted(0), admitted(1))
    ledger.step(1, [trained(0), trained(1)], COUNTS)
    line = ledger.lines
    add(ledger, admitted(2))
    ledger.close()
    successor, _ = begun(tmp_path, 1, line)
    add(successor, msgspec.structs.replace(admitted(2), adopted=True))
    successor.close()
    rollouts = [entry.line for entry in counting(tmp_path) if isinstance(entry.line, Admitted)]
    assert [(each.rollout, each.adopted) for each in rollouts] == [("r0", False), ("r1", False), ("r2", True)]


@pytest.mark.parametrize("file_bytes", [1 << 20, 300], ids=["one file", "several files"])
def test_two_lineages_may_continue_after_the_same_step(tmp_path: Path, file_bytes: int) -> None:
    """The brain died and went on from memory; the launcher died too, before there was another checkpoint."""
    ledger, _ = begun(tmp_path, file_bytes=file_bytes)
    add(ledger, admitted(0), admitted(1), admitted(2))
    ledger.step(1, [trained(0), trained(1)], COUNTS)
    line = ledger.lines
    add(ledger, dropped(2, "failed"))
    ledger.close()
    brain, _ = begun(tmp_path, 1, line, file_bytes)
    add(brain, msgspec.structs.replace(admitted(2), adopted=True), dropped(2, "failed"))
    brain.close()
    launch, ended = begun(tmp_path, 1, line, file_bytes)
    launch.close()
    assert ended == {"r0": "trained", "r1": "trained"}
    *before, begin = (entry.line for entry in counting(tmp_path))
    assert isinstance(begin, Begin)
    assert (begin.lineage, begin.after) == (2, line)
    assert [type(each) for each in before] == [Begin, *[Admitted] * 3, *[Trained] * 2, Step]


def test_a_lineage_after_a_damaged_one_counts_none_of_the_lines_before_that(tmp_path: Path) -> None:
    """It cannot be read which of them it went on from."""
    first, _ = begun(tmp_path)
    add(first, admitted(0), dropped(0, "failed"))
    first.step(1, [], COUNTS)
    line = first.lines
    first.close()
    second, ended = begun(tmp_path, 1, line)
    assert ended == {"r0": "failed"}
    add(second, admitted(1), dropped(1, "timeout"))
    second.step(2, [], COUNTS)
    line = second.lines
    second.close()
    damage(tmp_path, b'"lineage":1,"version":1,"after":4', b'"lineage":1,"version":1,"after":x')
    third, ended = begun(tmp_path, 2, line)
    third.close()
    assert (third.lineage, ended) == (2, {"r1": "timeout"})


def test_a_line_that_a_kill_cut_off_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = begun(tmp_path)
    first.step(1, [], COUNTS)
    line = first.lines
    first.close()
    with (tmp_path / "000001.jsonl").open("ab") as file:
        file.write(b'{"kind":"admit')
    second, _ = begun(tmp_path, 1, line)
    second.close()
    assert [type(entry.line) for entry in counting(tmp_path)] == [Begin, Step, Begin]
    assert "ends within a line: the last 14 bytes are cut away" in caplog.text


def test_a_beginning_that_failed_is_made_again_with_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server is away for a moment, and the master repeats its call."""
    first, _ = begun(tmp_path)
    add(first, admitted(0), dropped(0, "failed"))
    first.step(1, [], COUNTS)
    line = first.lines
    first.close()

    def away(folder: Path) -> Iterator[bytes]:
        yield from list(lines_in(folder))[:3]
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    second = new_ledger(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "lines_in", away)
        with pytest.raises(OSError):
            second.begin(1, GateCheckpoint(line=line))
    assert dict(items(second.begin(1, GateCheckpoint(line=line)))) == {"r0": "failed"}
    second.close()
    assert [entry.line.line for entry in counting(tmp_path) if isinstance(entry.line, Begin)] == [1, 5]
