"""A part of a run's output that fails is reported, and the others continue."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl.config.run_dir import LOGS_DIR, METRICS_FILE, OBSERVED_DIR
from asyncrl.observe.status import StatusLine, StepSizes
from asyncrl.runtime.trials import run_output
from asyncrl.runtime.trials.run_output import RunOutput

SIZES = StepSizes(10, 8, 4)


async def test_a_disk_that_refuses_writes_is_one_line_when_that_begins_and_one_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_output, "ASK_S", 0.0)
    reported: list[str] = []
    looks, seen = 0, asyncio.Event()
    loop = asyncio.get_running_loop()

    def write_error(folder: Path) -> OSError | None:
        nonlocal looks
        looks += 1
        if looks == 12:
            loop.call_soon_threadsafe(seen.set)
        return OSError(errno.ENOSPC, "No space left on device") if 3 <= looks < 8 else None

    monkeypatch.setattr(run_output, "write_error", write_error)
    watching = asyncio.create_task(RunOutput(tmp_path, cast(Any, SimpleNamespace(note=reported.append)))._watch_disk())
    async with asyncio.timeout(60):
        await seen.wait()
    watching.cancel()
    began, ended = reported
    assert began == (
        f"WAITING: the disk of {tmp_path} refuses writes (No space left on device): free some space, or mend it; the "
        "run waits for up to 10 minutes"
    )
    assert ended.startswith(f"the disk of {tmp_path} takes writes again, after ")


@pytest.mark.parametrize(
    ("sizes", "line", "reported"),
    [
        (None, {"stage": "waits for x/0", "activity": "blocked"}, "waits for x/0"),
        (SIZES, {"stage": "waits for x/0", "activity": "blocked"}, None),  # the display shows it until the first step
        (None, {"stage": "waits for the rollouts of step 3", "activity": "waits"}, None),
        (None, {"stage": "loads the model", "activity": "works"}, None),
        (
            SIZES,
            {"stage": "ready", "activity": "serves", "names_away_s": 12.0},
            "cannot reach name resolution (retried ",
        ),
    ],
)
async def test_a_wait_of_processes_is_one_line_when_it_lasts_and_one_when_it_ends(
    sizes: StepSizes | None, line: dict[str, Any], reported: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_output, "ASK_S", 0.01)
    notes: asyncio.Queue[str] = asyncio.Queue()
    began = time.time()
    (tmp_path / OBSERVED_DIR).mkdir()

    def write(line: dict[str, Any], since: float) -> None:
        for name in ("model_worker-0", "model_worker-1"):
            with (tmp_path / OBSERVED_DIR / f"{name}.jsonl").open("a") as file:
                file.write(json.dumps({"at": time.time() + 1, "pid": 1, "since": since} | line) + "\n")

    states, outlooks = asyncio.Queue[list[StatusLine]](), asyncio.Queue[str]()
    display = SimpleNamespace(note=notes.put_nowait, stage_lines=states.put_nowait, outlook=outlooks.put_nowait)
    watching = asyncio.create_task(RunOutput(tmp_path, cast(Any, display))._watch_processes(sizes))
    write(line, began - 5.0)
    for _ in range(10):
        await asyncio.sleep(0.01)
    if "names_away_s" not in line:
        assert notes.empty(), "it may be over soon"
        write(line, began - 12.0)
    async with asyncio.timeout(60):
        if reported is not None:
            assert (await notes.get()).startswith(f"WAITING: model_worker/0 (and 1 others) {reported}")
            write({"stage": "ready", "activity": "serves"}, time.time())
            assert " no longer, after " in await notes.get()
        if sizes is not None:
            assert [each.text for each in await states.get()] != []
            assert await outlooks.get() == "", "no rollout has begun"
    watching.cancel()
    assert notes.empty()
    assert sizes is not None or states.empty(), "a run that trains nothing has no such state"


def observed(run_dir: Path, name: str, **line: Any) -> None:
    """Append a line of a process."""
    (run_dir / OBSERVED_DIR).mkdir(exist_ok=True)
    with (run_dir / OBSERVED_DIR / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps({"pid": 1, **line}) + "\n")


async def test_a_state_of_the_run_that_cannot_be_shown_leaves_the_notes_on_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(lines: object) -> None:
        raise KeyError("a defect")

    notes: asyncio.Queue[str] = asyncio.Queue()
    now = time.time()
    about = {"stage": "waits for x/0", "activity": "blocked", "since": now - 12.0}
    observed(tmp_path, "model_worker-0", at=now + 1, **about)
    display = SimpleNamespace(note=notes.put_nowait, stage_lines=broken)
    watching = asyncio.create_task(RunOutput(tmp_path, cast(Any, display))._watch_processes(SIZES))
    async with asyncio.timeout(60):
        assert (await notes.get()).startswith("WAITING: model_worker/0 waits for x/0"), "the display does not show it"
    watching.cancel()
    (record,) = caplog.records
    assert record.getMessage() == "output of the run: state of the run failed, and is missing from now on"


async def test_a_row_of_a_step_has_the_outlook_of_the_next_one_shown_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_output, "ASK_S", 3600.0)
    outlooks: asyncio.Queue[str] = asyncio.Queue()
    display = SimpleNamespace(outlook=outlooks.put_nowait, stage_lines=lambda lines: None, row=lambda row: None)
    output, now = RunOutput(tmp_path, cast(Any, display)), time.time()
    observed(tmp_path, "launcher-0", at=now)
    observed(tmp_path, "gserver_manager-0", at=now, rollouts_running=1)
    watching = asyncio.create_task(output._watch_processes(SIZES))
    async with asyncio.timeout(60):
        assert (await outlooks.get()).startswith("step 1 of 10")
        observed(tmp_path, "master_worker-0", at=now + 2)
        observed(tmp_path, "master_worker-0", span="train", step=1, begin=now, end=now + 1)
        (tmp_path / METRICS_FILE).write_text('{"step": 1}\n')
        output.show_new_rows()
        assert (await outlooks.get()).startswith("step 2 of 10")
    watching.cancel()


def test_a_folder_that_takes_a_file_has_no_fault_and_keeps_none_and_what_waiting_does_not_mend_is_none(
    tmp_path: Path,
) -> None:
    assert run_output.write_error(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert run_output.write_error(tmp_path / "missing") is None
    if Path("/dev/full").exists():
        (tmp_path / f".probe-{os.getpid()}").symlink_to("/dev/full")
        error = run_output.write_error(tmp_path)
        assert error is not None
        assert error.errno == errno.ENOSPC


class BrokenDisplay:
    """Cannot show rows."""

    def row(self, row: object) -> None:
        raise KeyError("a defect")


async def test_a_display_that_fails_is_reported_and_logs_are_still_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_output, "ASK_S", 0.01)
    rotated = asyncio.Event()
    loop = asyncio.get_running_loop()

    def rotate(folder: Path) -> None:
        if caplog.records:
            loop.call_soon_threadsafe(rotated.set)

    monkeypatch.setattr(run_output, "rotate", rotate)
    (tmp_path / LOGS_DIR).mkdir()
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n')
    following = asyncio.create_task(RunOutput(tmp_path, cast(Any, BrokenDisplay())).follow(None))
    async with asyncio.timeout(60):
        await rotated.wait()
    following.cancel()
    (record,) = caplog.records
    assert record.getMessage() == "output of the run: rows of metrics failed, and is missing from now on"
    assert (record.exc_info or [None])[0] is KeyError


def test_a_last_row_that_cannot_be_shown_does_not_hide_how_the_run_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n')
    output = RunOutput(tmp_path, cast(Any, BrokenDisplay()))
    output.show_last_rows()  # called in a `finally`: an error here would replace that of the run
    (record,) = caplog.records
    assert record.getMessage() == "output of the run: the last rows of metrics could not be shown"
