"""A process's lines about itself."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe import observer
from asyncrl.observe.observer import Observer

LIMIT_S = 20.0


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def wait_for_line(file: Path, wanted: Any) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for line in lines_of(file) if file.exists() else ():
            if wanted(line):
                return line
        threading.Event().wait(0.05)
    raise AssertionError(f"no such line within {LIMIT_S:g} s: {file.read_text()}")


def test_a_line_tells_stage_resources_and_gauges(tmp_path: Path) -> None:
    observed = Observer(tmp_path / "x.jsonl")
    observed.stage("loads the model")
    observed.gauges(lambda: {"running": 3})
    line = observed.line()
    assert (line["stage"], line["running"]) == ("loads the model", 3)
    assert line["rss"] > 1 << 20
    assert line["cpu_s"] > 0
    assert line["threads"] >= 1
    assert line["host_free"] > 0


def test_the_last_line_stays_when_the_process_ends_in_order(tmp_path: Path) -> None:
    observer.start(tmp_path, "rollout_worker", 1)
    observer.stage("plays")
    observer.span("update", 1.0, 2.5, version=7)
    observer.close()
    first, span, last = lines_of(tmp_path / "observed" / "rollout_worker-1.jsonl")
    assert first["stage"] == "starting"
    assert last["stage"] == "plays"
    assert last["ended"]
    assert span == {"span": "update", "begin": 1.0, "end": 2.5, "version": 7}
    observer.stage("nothing observes now")  # and none of these fails
    observer.span("update", 0, 1)


def test_the_last_line_says_why_a_process_failed(tmp_path: Path) -> None:
    observer.start(tmp_path, "rollout_worker", 1)
    observer.failed("ValueError: " + "x" * 100_000)
    observer.close()
    first, last = lines_of(tmp_path / "observed" / "rollout_worker-1.jsonl")
    assert "failed" not in first
    assert last["failed"].startswith("ValueError: xxx")
    assert len(last["failed"]) < 10_000


def test_a_gauge_that_fails_costs_only_its_figures(tmp_path: Path) -> None:
    observed = Observer(tmp_path / "x.jsonl")
    observed.gauges(lambda: {"broken": 1 / 0})
    observed.gauges(lambda: {"right": 1})
    line = observed.line()
    assert line["right"] == 1
    assert "broken" not in line


def test_a_moment_without_a_free_descriptor_costs_its_lines_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = 3
    read = observer._resources

    def none_is_free() -> dict[str, float]:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return read()

    monkeypatch.setattr(observer, "_resources", none_is_free)
    observed = Observer(tmp_path / "x.jsonl", every_s=0.01)
    observed.start()
    try:
        wait_for_line(tmp_path / "x.jsonl", lambda line: line["rss"] > 0)
    finally:
        observed.close()
    assert len([each for each in caplog.messages if "cannot read its own counters" in each]) == 1


def test_a_loop_that_user_code_blocks_is_told(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"

    async def block() -> None:
        observed.watch(asyncio.get_running_loop())
        await asyncio.sleep(0.6)
        await asyncio.to_thread(wait_for_line, file, lambda line: line.get("loop_late_s", 1.0) < 0.5)
        threading.Event().wait(1.2)  # the fault that is to be seen
        await asyncio.to_thread(wait_for_line, file, lambda line: line.get("loop_late_s", 0.0) > 0.7)

    observed = Observer(file, every_s=0.3)
    observed.start()
    asyncio.run(block())
    observed.close()


def test_the_files_of_a_process_are_bounded(tmp_path: Path) -> None:
    observed = Observer(tmp_path / "x.jsonl", file_bytes=2000)
    for number in range(200):
        observed.span("update", number, number + 1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.jsonl", "x.jsonl.1"]
    assert all(file.stat().st_size <= 2000 for file in tmp_path.iterdir())
    newest = lines_of(tmp_path / "x.jsonl.1") + lines_of(tmp_path / "x.jsonl")
    assert [line["begin"] for line in newest] == list(range(200 - len(newest), 200))


def test_a_folder_that_takes_nothing_costs_lines_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    observed = Observer(tmp_path / "not there" / "x.jsonl")
    observed.span("update", 0, 1)
    observed.span("update", 1, 2)
    assert len(caplog.records) == 1
    assert "takes no lines" in caplog.text
