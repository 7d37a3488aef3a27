"""The ledger's lines add up to the gate's books and to the prompts that wait, also when read back from the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.comm.ended_rollouts.ledger_lines import (
    Abandoned,
    Admitted,
    Begin,
    Dropped,
    Finished,
    LedgerBooks,
    Line,
    PromptGoes,
    RolloutLine,
    RunSettings,
    Trained,
)
from asyncrl.manager.messages import GateBooks
from asyncrl.master.books.ledger import Ledger
from asyncrl.master.data.sample_buffer import TrainBatch
from asyncrl.master.recovery.recorded import Recorded, Retry
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


def test_a_lost_rollout_comes_back_as_it_finishes_and_no_other_does() -> None:
    lost = dropped(0, "worker_died", PromptGoes.returned, 0)
    stale = dropped(1, "stale", PromptGoes.returned, 0)
    recorded = fold(admitted(0), admitted(1), lost, stale)
    assert recorded.books() == LedgerBooks(2, 0, {"worker_died": 1, "stale": 1}, 0, 0, 0)
    for rollout in ("r0", "r1"):
        recorded.take(Finished(rollout, 3, 1.0))
    assert list(recorded.open) == ["r0"]
    assert recorded.books() == LedgerBooks(2, 0, {"stale": 1}, 0, 0, 1)


@pytest.mark.parametrize("loss", ["worker_died", "lost_with_manager"])
def test_a_lost_rollout_that_the_trainer_dropped_has_that_end_and_does_not_come_back(loss: str) -> None:
    lines = [begin(), admitted(0), dropped(0, loss, PromptGoes.returned, 0), dropped(0, "stale", PromptGoes.used)]
    recorded = fold(*lines[1:])
    for _ in range(2):
        assert recorded.books() == LedgerBooks(1, 0, {"stale": 1}, 0, 0, 0)
        recorded.take(Finished("r0", 3, 1.0))
    assert not recorded.open
    assert audited(*lines) == []
    assert audited(*lines[:3], dropped(0, "stale", PromptGoes.returned)) != []
    assert audited(*lines, dropped(0, "stale", PromptGoes.used)) != []


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


def test_a_ledger_that_is_damaged_is_not_gone_on_with_in_silence(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, SETTINGS)
    ledger.begin(0, None, NO_BOOKS)
    take(ledger, admitted(0))
    state = ledger.saved(0, NO_BOOKS)
    ledger.close()
    file = tmp_path / "000001.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"order":0', b'"order":x'))
    resumed = Ledger(tmp_path, SETTINGS)
    resumed.begin(2, state, GateBooks(5, 4, {"stale": 1}, 0))
    assert resumed.recorded.books() == LedgerBooks(5, 4, {"stale": 1}, 0, 0, 0)
    resumed.close()
