"""A ledger that a master takes up after the one before it died: what was told stays, and is not told again."""

from __future__ import annotations

from pathlib import Path

from asyncrl.comm.ended_rollouts.ledger_lines import Admitted, Finished, RolloutLine, RunSettings, Saved
from asyncrl.manager.messages import GateBooks
from asyncrl.master.books.ledger import Ledger
from asyncrl.master.data.sample_buffer import TrainBatch
from asyncrl.verify.audit.ledger_files import Entry, read_ledger, surviving

BOOKS = GateBooks(submitted=0, trained=0, dropped={}, abandoned=0)
BATCH = TrainBatch(version=0, min_version=0, records=())


def open_ledger(folder: Path, file_bytes: int = 1 << 20) -> Ledger:
    return Ledger(folder, RunSettings(1, 1, "drop", 1, 0), now=lambda: 5.0, file_bytes=file_bytes)


def told(name: str) -> list[RolloutLine]:
    """Return the two lines that the manager reports of a rollout."""
    return [Admitted(name, f"e0-{name}", 0, 1, "rollout_worker/0", 0, 5.0), Finished(name, 3, 5.0)]


def begun(folder: Path, file_bytes: int = 1 << 20) -> tuple[Ledger, int]:
    """A ledger, and how many lines it had as the state of the first step was kept."""
    ledger = open_ledger(folder, file_bytes)
    ledger.begin(0, None, BOOKS)
    ledger.take(told("a"))
    return ledger, ledger.lines_written()


def check(folder: Path) -> list[Entry]:
    """Return the lines of the ledger that count; fail if anything in it is wrong."""
    findings: list[str] = []

    def report(place: str, what: str) -> None:
        findings.append(f"{place}: {what}")

    entries = list(surviving(read_ledger(folder, report), report))
    assert findings == []
    return entries


def test_a_checkpoints_line_outlives_the_master_that_wrote_it(tmp_path: Path) -> None:
    """The launcher dies too, before there is another checkpoint: the next launch goes on from that line."""
    for file_bytes in (1 << 20, 300):  # in one file; in several
        folder = tmp_path / str(file_bytes)
        ledger, kept = begun(folder, file_bytes)
        ledger.take([*told("b"), *told("c")])
        ledger.step(BATCH, BOOKS)
        state = ledger.saved(1, BOOKS)
        ledger.take(told("d"))
        ledger.lines_written()

        successor = open_ledger(folder, file_bytes)
        stayed = successor.go_on(kept)
        assert successor.lineage == 0
        assert (len(list(folder.iterdir())) > 1) == (file_bytes == 300)
        successor.take(told("e"))
        successor.close()
        open_ledger(folder, file_bytes).begin(1, state, BOOKS)
        *_, saved, _ = check(folder)
        assert isinstance(saved.line, Saved)
        assert saved.line.version == 1
        assert stayed is True


def test_what_was_told_after_the_kept_state_is_not_told_again(tmp_path: Path) -> None:
    ledger, kept = begun(tmp_path)
    ledger.take(told("b"))
    ledger.step(BATCH, BOOKS)
    ledger.lines_written()
    successor = open_ledger(tmp_path)
    assert successor.go_on(kept) is True
    successor.close()
    rollouts = [entry.line.rollout for entry in check(tmp_path) if isinstance(entry.line, Admitted)]
    assert rollouts == ["a", "b"]


def test_a_checkpoint_before_the_kept_state_may_still_be_gone_on_from(tmp_path: Path) -> None:
    ledger, _ = begun(tmp_path)
    ledger.step(BATCH, BOOKS)
    state = ledger.saved(1, BOOKS)
    kept = ledger.lines_written()
    ledger.take(told("b"))
    ledger.lines_written()
    successor = open_ledger(tmp_path)
    assert successor.go_on(kept) is False
    successor.close()
    open_ledger(tmp_path).begin(1, state, BOOKS)
    check(tmp_path)
