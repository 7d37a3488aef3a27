"""A part of a run's output that fails is reported, and the others continue."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from asyncrl.config.run_dir import LOGS_DIR, METRICS_FILE
from asyncrl.runtime.trials import run_output
from asyncrl.runtime.trials.run_output import RunOutput


class BrokenDisplay:
    """Cannot show rows."""

    def row(self, row: object) -> None:
        raise KeyError("a defect")


async def test_a_display_that_fails_is_reported_and_logs_are_still_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_output, "ROTATE_S", 0.01)
    rotated = asyncio.Event()
    loop = asyncio.get_running_loop()

    def rotate(folder: Path) -> None:
        if caplog.records:
            loop.call_soon_threadsafe(rotated.set)

    monkeypatch.setattr(run_output, "rotate", rotate)
    (tmp_path / LOGS_DIR).mkdir()
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n')
    following = asyncio.create_task(RunOutput(tmp_path, cast(Any, BrokenDisplay())).follow(standing=False))
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
