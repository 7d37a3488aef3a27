"""Sinks of a run's metrics."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm import files
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.observe.metrics import sinks, wandb_sink
from asyncrl.observe.metrics.sample_tables import Table
from asyncrl.observe.metrics.sinks import (
    MetricsWriter,
    Row,
    Sink,
    Watcher,
)
from asyncrl.observe.tail import read_rows
from asyncrl.plugins.settings import McpServerConfig
from tests.refusing_disk import refusing

LIMIT_S = 300.0


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(file, 0)) as writer:
        writer.write(1, {"loss": 0.5, "parts": [1.0, 2.0]})
        assert read_rows(file) == [{"step": 1, "loss": 0.5, "parts": [1.0, 2.0]}]


def test_a_step_has_one_row(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path / "metrics.jsonl", 0)) as writer:
        writer.write(2, {})
        for step in (1, 2):
            with pytest.raises(ValueError, match=f"step {step} comes after that of step 2"):
                writer.write(step, {})


def test_a_resumed_run_cuts_what_comes_after_its_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "x": step}) for step in range(1, 6)]
    file.write_text("\n".join(lines) + '\n{"step": 6, "x"')
    with closing(MetricsWriter(file, 4)) as writer:
        assert writer.last_step == 3
        writer.write(4, {"x": 40})
    assert [(row["step"], row["x"]) for row in read_rows(file)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_a_row_cut_off_by_a_kill_is_removed_even_within_the_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2')
    with closing(MetricsWriter(file, 9)) as writer:
        assert writer.last_step == 1
        writer.write(2, {})
    assert read_rows(file) == [{"step": 1}, {"step": 2}]


def test_a_run_without_a_checkpoint_starts_over(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step": 1}\n')
    with closing(MetricsWriter(file, 0)) as writer:
        assert writer.last_step == -1
    assert read_rows(file) == []


def test_every_sink_gets_every_row(tmp_path: Path) -> None:
    class Memory(Sink):
        def __init__(self) -> None:
            self.rows: list[tuple[int, Row]] = []
            self.tables: list[tuple[int, Table]] = []
            self.closed = False

        def write(self, step: int, row: Row) -> None:
            self.rows.append((step, row))

        def samples(self, step: int, table: Table) -> None:
            self.tables.append((step, table))

        def close(self) -> None:
            self.closed = True

    memory = Memory()
    watcher = Watcher("Memory", lambda: memory, pytest.fail)
    with closing(MetricsWriter(tmp_path / "metrics.jsonl", 0, watcher)) as writer:
        writer.write(1, {"a": 1.0})
        writer.samples(1, [["e0-0", "0", "1", "0", "4"]])
    assert memory.rows == [(1, {"a": 1.0})]
    assert memory.tables == [(1, [["e0-0", "0", "1", "0", "4"]])]
    assert memory.closed


def shown_by_tensorboard(folder: Path) -> Any:
    """Return what TensorBoard finds in `folder`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def points(folder: Path) -> dict[tuple[int, str], float]:
    """Return the points that TensorBoard shows of the event files in `folder`, by step and curve."""
    shown = shown_by_tensorboard(folder)
    return {(event.step, tag): event.value for tag in shown.Tags()["scalars"] for event in shown.Scalars(tag)}


def test_tensorboard_shows_every_number_at_its_step_and_no_lists(tmp_path: Path) -> None:
    with closing(MetricsWriter.open(tmp_path / "metrics.jsonl", ExperimentConfig())) as writer:
        writer.write(0, {"eval/held_out/accuracy": 0.125})
        writer.write(300, {"reward/mean": 0.5, "loss": -1, "parts": [1.0]})
    assert points(tmp_path / "tensorboard") == {
        (0, "eval/held_out/accuracy"): 0.125, (300, "reward/mean"): 0.5, (300, "loss"): -1.0,
    }  # fmt: skip


def test_tensorboard_shows_samples_as_text(tmp_path: Path) -> None:
    with closing(MetricsWriter.open(tmp_path / "metrics.jsonl", ExperimentConfig())) as writer:
        writer.samples(7, [["e0-0", "0", "1", "0", "4+5=9"]])
    shown = shown_by_tensorboard(tmp_path / "tensorboard")
    (event,) = shown.Tensors("samples")
    assert event.step == 7
    assert event.tensor_proto.string_val[0].decode().endswith("| e0-0 | 0 | 1 | 0 | 4+5=9 |")
    assert shown.PluginTagToContent("text").keys() == {"samples"}


def test_tensorboard_hides_what_comes_after_the_checkpoint_of_a_resumed_run(tmp_path: Path) -> None:
    for first_step, steps in ((0, range(8)), (3, range(3, 6)), (5, ())):
        with closing(MetricsWriter.open(tmp_path / "metrics.jsonl", ExperimentConfig(), first_step)) as writer:
            for step in steps:
                writer.write(step, {"x": 10 * first_step + step})
    assert points(tmp_path / "tensorboard") == {
        (0, "x"): 0, (1, "x"): 1, (2, "x"): 2, (3, "x"): 33, (4, "x"): 34,
    }  # fmt: skip


def test_a_writer_that_is_closed_leaves_no_file_open(tmp_path: Path) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    with closing(MetricsWriter.open(tmp_path / "metrics.jsonl", ExperimentConfig())) as writer:
        writer.write(1, {"x": 1.0})
    assert len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.parametrize("most", [0, 7])
def test_rows_and_points_wait_for_a_disk_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Also where it takes a part of a row that is longer than any buffer, and where files cannot be opened."""
    monkeypatch.setattr(files, "_BACKOFF", files.Backoff(0.001, 0.001))
    rows = {step: {f"figure/{number}": float(number * step) for number in range(1000)} for step in (0, 1)}
    pwrite, calls = os.pwrite, [0]

    def full_at_times(descriptor: int, data: bytes, place: int) -> int:
        calls[0] += 1
        if calls[0] % 3 == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data[:most] if most and calls[0] % 3 == 2 else data, place)

    monkeypatch.setattr(os, "pwrite", full_at_times)
    with (
        refusing(3, errno.EROFS, tmp_path),
        closing(MetricsWriter.open(tmp_path / "metrics.jsonl", ExperimentConfig())) as writer,
    ):
        for step, row in rows.items():
            writer.write(step, row)
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": step, **row} for step, row in rows.items()]
    shown = {(step, tag): value for step, row in rows.items() for tag, value in row.items()}
    assert points(tmp_path / "tensorboard") == shown


def test_the_event_files_writer_does_not_load_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from asyncrl.observe.metrics.sinks import TensorBoardSink; "
        f"TensorBoardSink(Path({str(tmp_path)!r}), 0).write(1, {{'x': 1.0}}); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log, wandb's file format: blocks of 32 KiB of chunks, each a header of 7 bytes and data."""
    at, record = 7, b""  # after wandb's own header
    while at + 7 <= len(log):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        if at + 7 + size > len(log):
            return  # it is being written
        record += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last chunk
            yield record
            record = b""


def wandb_records(folder: Path, launches: int, rows: int) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Config and rows of each launch, from the files that wandb keeps without a network.

    A process of its own writes them. wandb tells it of a run's end and does not wait until the file is closed, so they
    are read once there are so many `launches`, and so many `rows` of the last.
    """
    deadline, pause = time.monotonic() + LIMIT_S, threading.Event()
    while len(found := _wandb_launches(folder)) < launches or len(found[-1][1]) < rows:
        assert time.monotonic() < deadline, found
        pause.wait(0.05)
    return found


def _wandb_launches(folder: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    from wandb.proto import wandb_internal_pb2

    launches = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        config, rows = dict[str, Any](), []
        for data in leveldb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for update in (*record.run.config.update, *record.config.update):
                config[update.key or "/".join(update.nested_key)] = json.loads(update.value_json)
            if record.history.item:
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
            if record.HasField("run") and record.run.run_id:
                config["run id"] = record.run.run_id
        launches.append((config, rows))
    return launches


def test_wandb_has_the_config_and_goes_on_with_the_same_run_until_the_trial_is_wiped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = ExperimentConfig(experiment_name="math", trial_name="a", total_train_steps=7)
    config.logging.wandb_project, config.logging.tensorboard = "p", False
    config.env.args = {"api_key": "sk-1", "size": 3}
    config.mcp = [McpServerConfig(name="wiki", headers={"Authorization": "Bearer abc"})]
    for first_step, steps in ((0, range(3)), (2, range(2, 4))):  # the second launch goes back by one step
        with closing(MetricsWriter.open(tmp_path / "metrics.jsonl", config, first_step)) as writer:
            for step in steps:
                writer.write(step, {"x": 10 * first_step + step, "parts": [1.0]})
            writer.samples(steps[-1], [["e0-0", "0", "1", "0", "4+5=9"]])
        config.total_train_steps = 9
    (before, first), (after, second) = wandb_records(tmp_path, launches=2, rows=3)
    assert [[row[key] for key in ("step", "x")] for row in first if "x" in row] == [[0, 0], [1, 1], [2, 2]]
    assert [[row[key] for key in ("step", "x")] for row in second if "x" in row] == [[2, 22], [3, 23]]
    assert before["run id"] == after["run id"]
    assert (before["total_train_steps"], after["total_train_steps"]) == (7, 9)
    assert before["env"]["args"] == {"api_key": "(hidden)", "size": 3}
    assert "sk-1" not in str(before)
    assert "abc" not in str(before)
    (tmp_path / "wandb_id").unlink()
    with closing(MetricsWriter.open(tmp_path / "metrics.jsonl", config)) as writer:
        writer.write(0, {"x": 0})
    assert wandb_records(tmp_path, launches=3, rows=1)[-1][0]["run id"] != after["run id"]


def test_an_empty_file_of_the_wandb_id_counts_as_absent(tmp_path: Path) -> None:
    file = tmp_path / "wandb_id"
    file.touch()
    first = wandb_sink._wandb_id(file)
    assert first
    assert wandb_sink._wandb_id(file) == first == file.read_text()


class Broken(Sink):
    """Fails, or does not return, where it is told to."""

    def __init__(self, where: str, hang: threading.Event | None = None) -> None:
        self._where, self._hang = where, hang
        self._act("make")

    def _act(self, now: str) -> None:
        if now == self._where and self._hang is not None:
            self._hang.wait()
        elif now == self._where:
            raise RuntimeError("https://me:pw@tracker is away")

    def write(self, step: int, row: Row) -> None:
        self._act("write")

    def samples(self, step: int, table: Table) -> None:
        self._act("samples")

    def close(self) -> None:
        self._act("close")


@pytest.mark.parametrize("where", ["make", "write", "samples", "close"])
def test_a_sink_that_fails_is_off_with_one_warning_and_the_run_goes_on(tmp_path: Path, where: str) -> None:
    warned, config = list[str](), ExperimentConfig()
    config.logging.tensorboard = False
    watcher = Watcher("Tracker", lambda: Broken(where), warned.append)
    with closing(MetricsWriter(tmp_path / "metrics.jsonl", 0, watcher)) as writer:
        for step in range(3):
            writer.write(step, {"x": step})
            writer.samples(step, [])
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    reason = "RuntimeError: https://(hidden)@tracker is away"
    assert warned == [f"WARNING: Tracker gets no more metrics: {reason}; the run goes on"]


@pytest.mark.parametrize("where", ["make", "write", "close"])
def test_a_sink_that_does_not_return_holds_up_neither_a_step_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(sinks, "_CLOSE_S", 0.1)
    monkeypatch.setattr(sinks, "_HELD_ROWS", 2 if where == "write" else 100)
    warned, hang = list[str](), threading.Event()
    watcher = Watcher("Tracker", lambda: Broken(where, hang), warned.append)
    with closing(MetricsWriter(tmp_path / "metrics.jsonl", 0, watcher)) as writer:
        for step in range(9):
            writer.write(step, {"x": step})
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 9
    assert len(warned) == 1
    assert ("has not taken the last 2 rows" if where == "write" else "does not end within") in warned[0]
    hang.set()


def test_a_file_that_the_audit_needs_is_not_optional(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path / "metrics.jsonl", 0)) as writer:
        os.close(writer._file._descriptor)
        with pytest.raises(OSError, match="Bad file descriptor"):
            writer.write(1, {})
        writer._file._descriptor = os.open(tmp_path, os.O_RDONLY)  # which closing may close


def test_a_run_goes_on_when_the_helper_process_of_wandb_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # the helper of a test before, which the child would share
    code = f"""
import contextlib, os, threading, time
import psutil
from pathlib import Path
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.observe.metrics.sinks import MetricsWriter
config, warned = ExperimentConfig(), []
config.logging.wandb_project, config.logging.tensorboard = "p", False
writer = MetricsWriter.open(Path({str(tmp_path)!r}) / "metrics.jsonl", config, 0, warned.append)
writer.write(0, {{"x": 0}})
watcher, taken = writer._watchers[0], threading.Event()
watcher.do(lambda sink: taken.set())  # W&B is there, and has the first row
assert taken.wait(200)
for process in psutil.Process().children(recursive=True):
    with contextlib.suppress(psutil.NoSuchProcess):
        if "wandb-core" in process.name():
            process.kill()
            process.wait()
            print("killed")
step = 0
while (not warned and step < 4000) or step < 40:  # rows go on after the warning
    step += 1
    writer.write(step, {{"x": step}})
    time.sleep(0.05)
writer.close()
assert len(warned) == 1, warned
print(*warned, step, sep="\\n", flush=True)
os._exit(0)  # as processes of a run do
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout.partition("\n")[0]) == (0, "killed"), done.stderr
    assert "Weights & Biases gets no more metrics" in done.stdout
    assert len(read_rows(tmp_path / "metrics.jsonl")) == int(done.stdout.split()[-1]) + 1


@pytest.mark.parametrize("mode", ["online", "offline", "netrc", "key"])
def test_a_missing_key_of_wandb_is_found_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password " + "0" * 40 + "\n")
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    environment = os.environ | {"HOME": str(tmp_path), "WANDB_MODE": "offline" if mode == "offline" else "online"}
    environment |= {"NETRC": str(tmp_path / "netrc")} if mode == "netrc" else {}
    environment |= {"WANDB_API_KEY": "0" * 40} if mode == "key" else {}
    code = (
        "from asyncrl.config.experiment import ExperimentConfig; from asyncrl.observe.checks import check; "
        "config = ExperimentConfig(); config.logging.wandb_project = 'p'; print(*check(config), sep='')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True, env=environment
    )
    reported = "logging.wandb_project='p': there is no API key; run `wandb login`, set WANDB_API_KEY, or set"
    assert done.stdout.startswith(reported) if mode == "online" else done.stdout.strip() == ""
