"""Lines of processes on other hosts come home once, in order, on the launcher's clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.observer import append_line
from asyncrl.observe.status import ProcessHistory
from asyncrl.staging.client import ObservedRequest
from asyncrl.staging.forwarding import HostClock, ObservedHome, ObservedLines

NAME = "rollout_worker-3.jsonl"


def host(folder: Path) -> Path:
    (folder / "observed").mkdir(parents=True)
    return folder


def write(run_dir: Path, *times: float, name: str = NAME) -> None:
    for at in times:
        append_line(
            run_dir / "observed" / name, json.dumps({"at": at, "since": at - 1.0, "stage": "plays"}).encode() + b"\n"
        )


def at_home(run_dir: Path, name: str = NAME) -> list[float]:
    file = run_dir / "observed" / name
    return [json.loads(line)["at"] for line in file.read_text().splitlines()] if file.exists() else []


def test_lines_come_once_and_in_order_though_a_batch_is_sent_twice(tmp_path: Path) -> None:
    there, home = host(tmp_path / "there"), ObservedHome(host(tmp_path / "home"))
    lines = ObservedLines(there)
    write(there, 1.0, 2.0)
    batch = lines.take(1 << 20)
    home.append(batch)
    assert lines.take(1 << 20) == batch, "its arrival is not known yet"
    home.append(batch)
    lines.arrived(batch)
    write(there, 3.0)
    home.append(lines.take(1 << 20))
    assert at_home(tmp_path / "home") == [1.0, 2.0, 3.0]


def test_times_are_on_the_launchers_clock_and_readers_find_the_process(tmp_path: Path) -> None:
    there, home = host(tmp_path / "there"), ObservedHome(host(tmp_path / "home"))
    span = {"span": "update", "begin": 98.0, "end": 101.0}
    write(there, 100.0)
    append_line(there / "observed" / NAME, json.dumps(span).encode() + b"\n")
    home.append(ObservedLines(there).take(1 << 20, 60.0))
    history = ProcessHistory(tmp_path / "home" / "observed")
    history.refresh()
    process = history.processes["rollout_worker/3"]
    assert process.last == {"at": 40.0, "since": 39.0, "stage": "plays"}
    assert list(process.spans) == [{"span": "update", "begin": 38.0, "end": 41.0}]


def test_a_sender_or_home_that_starts_again_repeats_nothing(tmp_path: Path) -> None:
    there, home = host(tmp_path / "there"), ObservedHome(host(tmp_path / "home"))
    write(there, 1.0, 2.0)
    home.append(ObservedLines(there).take(1 << 20))
    again = ObservedLines(there)
    home = ObservedHome(tmp_path / "home")
    write(there, 3.0)
    home.append(again.take(1 << 20))
    assert at_home(tmp_path / "home") == [1.0, 2.0, 3.0]


def test_a_file_that_was_full_is_read_to_its_end_and_a_batch_is_bounded(tmp_path: Path) -> None:
    there, home = host(tmp_path / "there"), ObservedHome(host(tmp_path / "home"))
    lines = ObservedLines(there)
    write(there, 1.0)
    lines.arrived(lines.take(1 << 20))
    write(there, 2.0)
    file = there / "observed" / NAME
    file.replace(file.with_name(file.name + ".1"))
    write(there, 3.0, 4.0)
    for _ in range(10):
        batch = lines.take(60)
        assert sum(map(len, batch.lines.get(NAME, []))) <= 60
        home.append(batch)
        lines.arrived(batch)
    assert at_home(tmp_path / "home") == [2.0, 3.0, 4.0], "what was read before the file was full comes once"


def test_a_file_that_was_full_twice_since_it_was_read_is_read_from_the_beginning_of_the_one_before(
    tmp_path: Path,
) -> None:
    there, home = host(tmp_path / "there"), ObservedHome(host(tmp_path / "home"))
    lines, file = ObservedLines(there), there / "observed" / NAME
    write(there, 1.0)
    lines.arrived(lines.take(1 << 20))
    with file.open():  # its number is not given to another file
        for time in (2.0, 3.0):
            file.replace(file.with_name(file.name + ".1"))
            write(there, time)
    home.append(lines.take(1 << 20))
    assert at_home(tmp_path / "home") == [2.0, 3.0]


@pytest.mark.parametrize("name", ["../secret", "rollout_worker-3.jsonl.1", "config.yaml", ""])
def test_a_name_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    home = ObservedHome(host(tmp_path / "home"))
    with pytest.raises(ValueError, match="no file of observed/"):
        home.append(ObservedRequest("a", {name: 0}, {name: ["{}"]}))


@pytest.mark.parametrize("line", ["{", "[1]", '{"at": "now"}', "{}", "null", "3"])
def test_a_line_that_is_none_is_left_out(tmp_path: Path, line: str) -> None:
    home = ObservedHome(host(tmp_path / "home"))
    home.append(ObservedRequest("a", {NAME: 0}, {NAME: [line, json.dumps({"at": 5.0})]}))
    assert at_home(tmp_path / "home") == [5.0]


def test_who_sees_the_launchers_folder_is_known(tmp_path: Path) -> None:
    home = ObservedHome(host(tmp_path / "home"))
    same, other = ObservedLines(tmp_path / "home"), ObservedLines(host(tmp_path / "there"))
    assert not same.are_home, "nobody has told yet"
    same.home = other.home = home.id
    assert same.are_home
    assert not other.are_home


def test_a_clock_is_estimated_by_the_shortest_exchange() -> None:
    clock = HostClock()
    assert clock.ahead_s is None
    assert clock.figures() == {}
    clock.exchanged(100.0, 40.0, 104.0)
    assert clock.figures() == {"clock_ahead_s": 62.0, "clock_within_s": 2.0}
    clock.exchanged(110.0, 50.05, 110.2)
    assert clock.figures() == {"clock_ahead_s": 60.05, "clock_within_s": 0.1}
    clock.exchanged(120.0, 62.0, 121.0)
    assert clock.ahead_s == pytest.approx(60.05), "a slower one changes nothing"


def test_the_doctor_tells_of_a_clock_that_is_off() -> None:
    from asyncrl.observe.doctor.health import _clock
    from asyncrl.observe.status import Process

    def reported(**line: Any) -> list[str]:
        process = Process("staging_server/1")
        process.lines.append({"at": 1.0, **line})
        return [finding.sentence for finding in _clock(process)]

    (sentence,) = reported(clock_ahead_s=-3.2, clock_within_s=0.01)
    assert "the clock of the host of staging_server/1 is 3.20 s behind" in sentence
    assert not reported(clock_ahead_s=0.3, clock_within_s=0.25)
    assert not reported()
