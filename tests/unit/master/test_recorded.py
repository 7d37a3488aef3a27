"""The ledger's lines add up to the gate's books and to the prompts that wait, also when read back from the files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from asyncrl.comm.ended_rollouts.ledger_lines import (
    Abandoned,
    Admitted,
    Begin,
    Dropped,
    Finished,
    LedgerBooks,
    Line,
    PolicyTokens,
    PromptGoes,
    RolloutLine,
    RunSettings,
    Step,
    Trained,
)
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.messages import GateBooks
from asyncrl.master.books.ledger import Ledger
from asyncrl.master.books.ledger_writer import lines_in
from asyncrl.master.data.sample_buffer import TrainBatch
from asyncrl.master.recovery.recorded import Recorded, Retry
from asyncrl.master.settings import OnStale
from asyncrl.trainer.messages import RolloutRecord
from asyncrl.verify.audit.ledger_files import Entry
from asyncrl.verify.audit.rules import Replay

SETTINGS = RunSettings(train_batch_size=2, max_head_offpolicyness=1, on_stale="drop", workers=1, seed=0)
BATCH = TrainBatch(version=0, min_version=0, records=())
NO_BOOKS = GateBooks(0, 0, {}, 0)


def begin(version: int = 0) -> Begin:
    return Begin(lineage=0, version=version, after=0, settings=SETTINGS, carried=None, line=1, at=1.0, seal="")


def admitted(order: int, rollout: str = "", attempt: int = 0) -> Admitted:
    return Admitted(rollout or f"r{order}", f"e0-{order}", order, attempt, "rollout_worker/0", 0, 1.0)


def dropped(
    order: int, reason: str, prompt: PromptGoes, attempt: int | None = None, failures: int = 0, rollout: str = ""
) -> Dropped:
    return Dropped(rollout or f"r{order}", reason, prompt, 1.0, attempt, failures)


def trained(order: int) -> Trained:
    return Trained(f"r{order}", f"e0-{order}", order, 0, 1, {0: 3}, 1, 1, 1.0)


def fold(*lines: Line) -> Recorded:
    recorded = Recorded()
    for line in (begin(), *lines):
        recorded.take(line)
    return recorded


def test_rollouts_without_an_end_are_open() -> None:
    recorded = fold(*map(admitted, range(4)), Finished("r1", 3, 1.0), trained(2), Abandoned("r3", 1.0))
    assert list(recorded.open) == ["r0", "r1"]
    assert recorded.finished == {"r1"}
    assert recorded.books() == LedgerBooks(4, 1, {}, 1, 1, 1)
    assert list(recorded.used) == ["e0-2"]


@pytest.mark.parametrize("end", ["worker_died", "lost_with_manager", "stale", "abandoned"])
def test_what_left_the_count_has_that_end_whatever_is_told_of_it_later(end: str) -> None:
    """A given-up worker may deliver its rollout after all, and an earlier manager's line may come late."""
    ended = Abandoned("r0", 1.0) if end == "abandoned" else dropped(0, end, PromptGoes.returned, 1)
    lines = [begin(), admitted(0), ended]
    recorded = fold(*lines[1:])
    books = recorded.books()
    assert (books.submitted, books.running, dict(recorded.ended.items())) == (1, 0, {"r0": end})
    assert audited(*lines) == []
    for late in (
        Finished("r0", 3, 1.0),
        dropped(0, "failed", PromptGoes.given_up),
        Abandoned("r0", 1.0),
        Finished("r0", 3, 1.0),
    ):
        recorded.take(late)
        assert audited(*lines, late) != []
        assert recorded.books() == books
        assert (recorded.open, recorded.finished, list(recorded.used)) == ({}, set(), [])
    assert recorded.retries == ({} if end == "abandoned" else {"e0-0": Retry(0, 1, 0)}), "it is played again"


def audited(*lines: Line) -> list[str]:
    """What the audit finds."""
    found: list[str] = []
    replay = Replay(None, lambda place, what: found.append(what))
    replay.run(Entry(number, "ledger", line) for number, line in enumerate(lines, 1))
    return found


def test_a_trained_rollout_stays_trained_whatever_is_told_of_it() -> None:
    before = fold(admitted(0), dropped(0, "worker_died", PromptGoes.returned, 1), trained(0))
    after = fold(trained(0), admitted(0), dropped(0, "stale", PromptGoes.returned, 1), Finished("r0", 3, 1.0))
    for recorded in (before, after):
        assert recorded.books() == LedgerBooks(1, 1, {}, 0, 0, 0)
        assert (recorded.open, recorded.retries) == ({}, {})


def test_a_prompt_that_waits_has_the_numbers_of_its_next_try() -> None:
    recorded = fold(
        admitted(0),
        dropped(0, "too_hard", PromptGoes.returned, attempt=1),
        admitted(1),
        dropped(1, "failed", PromptGoes.returned, attempt=0, failures=2),
        admitted(2),
        dropped(2, "stale", PromptGoes.returned, attempt=0),
    )
    assert recorded.retries == {"e0-0": Retry(0, 1, 0), "e0-1": Retry(1, 0, 2)}
    recorded.take(admitted(0, "r8", attempt=1))
    recorded.take(admitted(1, "r9"))
    assert recorded.retries == {}
    recorded.take(dropped(0, "too_hard", PromptGoes.given_up, rollout="r8"))
    assert list(recorded.used) == ["e0-0"]


def test_a_launch_forgets_what_was_open_and_keeps_what_was_dropped() -> None:
    recorded = fold(admitted(0), admitted(1), dropped(1, "failed", PromptGoes.given_up))
    recorded.take(begin(version=3))
    assert recorded.books() == LedgerBooks(7, 6, {"failed": 1}, 0, 0, 0)
    assert list(recorded.used) == ["e0-1"]


def take(ledger: Ledger, *lines: RolloutLine) -> None:
    ledger.take(lines)


def test_a_successor_reads_back_what_was_told_last(tmp_path: Path) -> None:
    """Also what nobody synced, and without what a launch between has forgotten."""
    first = Ledger(tmp_path, SETTINGS, file_bytes=600)
    first.begin(0, None, NO_BOOKS)
    take(first, admitted(0), admitted(1), dropped(0, "too_hard", PromptGoes.returned, attempt=1))
    state = first.saved(0, NO_BOOKS)
    take(first, dropped(1, "failed", PromptGoes.given_up))
    second = Ledger(tmp_path, SETTINGS, file_bytes=600)
    second.begin(0, state, NO_BOOKS)
    line = second.lines_written()
    take(second, admitted(2))
    second.step(BATCH, None)
    take(second, admitted(3), Finished("r3", 3, 1.0))

    successor = Ledger(tmp_path, SETTINGS, file_bytes=600)
    successor.go_on(line)
    recorded = successor.recorded
    assert recorded.open == second.recorded.open == {"r2": admitted(2), "r3": admitted(3)}
    assert recorded.finished == {"r3"}
    assert recorded.retries == {"e0-0": Retry(0, 1, 0)}
    assert list(recorded.used) == []
    for ledger in (first, second, successor):
        ledger.close()


def test_a_ledger_that_is_damaged_is_not_gone_on_with_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path, SETTINGS)
    ledger.begin(0, None, NO_BOOKS)
    take(ledger, admitted(0))
    state = ledger.saved(0, NO_BOOKS)
    ledger.close()
    damage(tmp_path, b'"order":0', b'"order":x')
    resumed = Ledger(tmp_path, SETTINGS)
    resumed.begin(2, state, GateBooks(5, 4, {"stale": 1, "timeout": 0}, 0))
    assert resumed.recorded.books() == LedgerBooks(5, 4, {"stale": 1}, 0, 0, 0)
    assert "earlier history is lost" in caplog.text
    line = msgspec.json.decode(list(lines_in(tmp_path))[-1], type=Begin)
    assert (line.after, line.carried) == (0, LedgerBooks(5, 4, {"stale": 1}, 0, 0, 0))
    resumed.close()
    successor = Ledger(tmp_path, SETTINGS)
    damage(tmp_path, b'"version":2', b'"version":x')
    with pytest.raises(ValueError, match="is damaged; start the run again"):
        successor.go_on(0)


def lines(folder: Path) -> list[Line]:
    """The lines in the files as they are now."""
    return [msgspec.json.decode(line, type=Line) for line in lines_in(folder)]


def damage(folder: Path, before: bytes, after: bytes) -> None:
    file = folder / "000001.jsonl"
    assert before in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(before, after))


@pytest.mark.parametrize("state", [None, {"line": 3, "lineage": 0}], ids=["no state", "no ledger"])
def test_a_run_whose_history_is_gone_carries_its_counters(
    tmp_path: Path, state: dict[str, int] | None, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path, SETTINGS)
    ledger.begin(2, state, GateBooks(5, 4, {"stale": 1}, 0))
    (line,) = lines(tmp_path)
    assert isinstance(line, Begin)
    assert (line.after, line.carried) == (0, LedgerBooks(5, 4, {"stale": 1}, 0, 0, 0))
    assert ledger.recorded.books() == line.carried
    assert "earlier history is lost" in caplog.text
    ledger.close()


def test_a_run_that_begins_or_goes_on_carries_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Ledger(tmp_path, SETTINGS)
    first.begin(0, None, NO_BOOKS)
    state = first.saved(0, NO_BOOKS)
    second = Ledger(tmp_path, SETTINGS)
    second.begin(1, state, GateBooks(2, 2, {}, 0))
    begins = [line for line in lines(tmp_path) if isinstance(line, Begin)]
    assert [(line.lineage, line.after, line.carried) for line in begins] == [(0, 0, None), (1, 2, None)]
    assert not caplog.records


def test_what_a_checkpoint_an_end_or_a_kept_step_names_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = list[int](), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (synced.append(descriptor), sync(descriptor))[1])
    ledger = Ledger(tmp_path, SETTINGS)
    for syncs in (
        lambda: ledger.begin(0, None, NO_BOOKS),
        ledger.lines_written,
        lambda: ledger.saved(0, NO_BOOKS),
        lambda: ledger.end(0, NO_BOOKS),
        ledger.close,
    ):
        before = len(synced)
        syncs()
        assert len(synced) > before
        take(ledger, admitted(0))
        assert syncs == ledger.close or len(synced) == before + 1, "a line of the manager's alone may be lost"


def test_each_line_is_in_the_file_as_the_call_that_records_it_returns(tmp_path: Path) -> None:
    """It outlives the process from then on."""
    ledger = Ledger(tmp_path, SETTINGS, now=lambda: 1.23456)
    ledger.begin(0, None, NO_BOOKS)
    calls: list[Callable[[], object]] = [
        lambda: ledger.begin_manager(7),
        lambda: ledger.take([admitted(0)]),
        lambda: ledger.step(BATCH, GateBooks(3, 2, {"stale": 1, "timeout": 0}, 0, 0, 0)),
        lambda: ledger.saved(1, NO_BOOKS),
        lambda: ledger.end(1, NO_BOOKS),
    ]
    found: list[Line] = []
    for number, call in enumerate(calls, 2):
        call()
        *_, line = found = lines(tmp_path)
        assert len(found) == number
        assert not hasattr(line, "line") or line.line == number
        assert line.at in (1.0, 1.235), "in milliseconds"
    ledger.begin_manager(7)
    assert lines(tmp_path) == found, "its lines are known to be its own"
    assert ledger.lines_written() == len(found)
    ledger.close()


def test_a_rollout_that_is_trained_is_recorded_with_what_made_it(tmp_path: Path) -> None:
    """Two episodes, one of two samples; the judge's sample trains another policy, and a third policy was asked too."""
    metrics = {"rollout/generated/actor": 12.0, "rollout/generated/judge": 4.0, "rollout/generated/idle": 3.0}
    metrics |= {"opponent/past/oldest_version": 2.0, "opponent/past/newest_version": 5.0, "opponent/past/version": 3.5}
    record = RolloutRecord(
        *("r1", "e0-1", 1, 0, 3, {3: 2, 4: 9}, (9, 9, 9), (5, 4, 2), (1.0, 0.0, 0.25), (False,) * 3, (0, 0, 1)),
        metrics=metrics,
        groups=("", "judge/0", "solver"),
    )
    ledger = Ledger(tmp_path, SETTINGS)
    ledger.begin(0, None, NO_BOOKS)
    ledger.step(TrainBatch(4, 0, (record, msgspec.structs.replace(record, metrics={}, groups=()))), None)
    ledger.close()
    _, line, plain, step = lines(tmp_path)
    assert isinstance(line, Trained)
    assert (line.rollout, line.prompt, line.order, line.lineage, line.step) == ("r1", "e0-1", 1, 0, 5)
    assert (line.versions, line.episodes, line.samples, line.reward) == ({3: 2, 4: 9}, 2, 3, 0.375)
    assert line.opponents == {"past": (2, 5)}
    assert line.policies == {
        "actor": PolicyTokens(12, 7, 2),
        "judge": PolicyTokens(4, 4, 1),
        "idle": PolicyTokens(3, 0, 0),
    }
    assert isinstance(plain, Trained)
    assert (plain.opponents, plain.policies) == ({}, {})
    assert isinstance(step, Step)
    assert (step.step, step.books) == (5, None)


def test_the_ledger_of_a_run_has_the_settings_by_which_it_is_judged(tmp_path: Path) -> None:
    config = ExperimentConfig(train_batch_size=3, max_head_offpolicyness=2, seed=9, on_stale=OnStale.mask)
    config.rollout.workers = 4
    config.dataset.shuffle = False
    for replay, workers in (("", 4), ("kept", 0)):
        config.samples.replay = replay
        ledger = Ledger.of_run(tmp_path / f"run{workers}", config)
        ledger.begin(0, None, NO_BOOKS)
        ledger.close()
        (line,) = lines(tmp_path / f"run{workers}" / "ledger")
        assert isinstance(line, Begin)
        assert line.settings == RunSettings(3, 2, "mask", workers, 9, shuffle=False)


def test_a_launch_after_a_damaged_one_counts_none_of_the_lines_before_it(tmp_path: Path) -> None:
    """It cannot be read which of them it went on from."""
    first = Ledger(tmp_path, SETTINGS)
    first.begin(0, None, NO_BOOKS)
    take(first, admitted(0), dropped(0, "failed", PromptGoes.given_up))
    state = first.saved(0, NO_BOOKS)
    second = Ledger(tmp_path, SETTINGS)
    second.begin(0, state, NO_BOOKS)
    damage(tmp_path, b'"lineage":1', b'"lineage":x')
    for ledger in (first, second):
        ledger.close()
    ledger = Ledger(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match="is damaged"):
        ledger.go_on(0)
    assert ledger.recorded.books() == LedgerBooks(0, 0, {}, 0, 0, 0)


def test_a_line_that_a_kill_cut_off_is_removed(tmp_path: Path) -> None:
    first = Ledger(tmp_path, SETTINGS)
    first.begin(0, None, NO_BOOKS)
    state = first.saved(0, NO_BOOKS)
    first.close()
    with (tmp_path / "000001.jsonl").open("ab") as file:
        file.write(b'{"kind":"admit')
    second = Ledger(tmp_path, SETTINGS)
    second.begin(0, state, NO_BOOKS)
    second.close()
    assert [type(line).__name__ for line in lines(tmp_path)] == ["Begin", "Saved", "Begin"]


def test_a_launch_that_is_gone_on_with_keeps_its_number_and_what_it_has_ruled_out(tmp_path: Path) -> None:
    first = Ledger(tmp_path, SETTINGS)
    first.begin(0, None, NO_BOOKS)
    state = first.saved(0, NO_BOOKS)
    take(first, admitted(0), dropped(0, "failed", PromptGoes.given_up))
    second = Ledger(tmp_path, SETTINGS)
    second.begin(0, state, NO_BOOKS)
    successor = Ledger(tmp_path, SETTINGS)
    assert successor.go_on(second.lines_written()) is False
    assert (successor.lineage, list(successor.recorded.used)) == (1, [])
    assert successor.saved(0, NO_BOOKS) == {"line": 6, "lineage": 1}
    for ledger in (first, second, successor):
        ledger.close()
