"""Where a run's numbers go."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.observability.metrics import (
    JsonlSink,
    MetricsError,
    MetricsWriter,
    Row,
    Sink,
    WandbSink,
    read_rows,
)
from asyncrl.observability.tensorboard import EventFile, crc32c


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(JsonlSink(file, 0)) as writer:
        writer.write(1, {"loss": 0.5, "parts": [1.0, 2.0]})
        assert read_rows(file) == [{"step": 1, "loss": 0.5, "parts": [1.0, 2.0]}]


def test_a_step_has_one_row(tmp_path: Path) -> None:
    with MetricsWriter(JsonlSink(tmp_path / "metrics.jsonl", 0)) as writer:
        writer.write(2, {})
        for step in (1, 2):
            with pytest.raises(ValueError, match=f"step {step} comes after that of step 2"):
                writer.write(step, {})


def test_a_resumed_run_cuts_what_comes_after_its_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "x": step}) for step in range(1, 6)]
    file.write_text("\n".join(lines) + '\n{"step": 6, "x"')
    with MetricsWriter(JsonlSink(file, 3)) as writer:
        assert writer.last_step == 3
        writer.write(4, {"x": 40})
    assert [(row["step"], row["x"]) for row in read_rows(file)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_a_row_cut_off_by_a_kill_is_removed_even_within_the_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2')
    with MetricsWriter(JsonlSink(file, 9)) as writer:
        assert writer.last_step == 1
        writer.write(2, {})
    assert read_rows(file) == [{"step": 1}, {"step": 2}]


def test_a_run_without_a_checkpoint_starts_over(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n')
    with MetricsWriter(JsonlSink(file, 0)) as writer:
        assert writer.last_step == 0
    assert read_rows(file) == []


def test_every_sink_gets_every_row(tmp_path: Path) -> None:
    class Memory(Sink):
        def __init__(self) -> None:
            self.rows: list[tuple[int, Row]] = []
            self.closed = False

        def write(self, step: int, row: Row) -> None:
            self.rows.append((step, row))

        def close(self) -> None:
            self.closed = True

    memory = Memory()
    with MetricsWriter(JsonlSink(tmp_path / "metrics.jsonl", 0), memory) as writer:
        writer.write(1, {"a": 1.0})
    assert memory.rows == [(1, {"a": 1.0})]
    assert memory.closed


def test_tensorboard_gets_numbers_and_no_lists(tmp_path: Path) -> None:
    config = ExperimentConfig()
    with MetricsWriter.open(tmp_path, config) as writer:
        writer.write(1, {"reward/mean": 0.5, "parts": [1.0]})
    events = b"".join(file.read_bytes() for file in (tmp_path / "tensorboard").iterdir())
    assert b"reward/mean" in events
    assert b"parts" not in events


def test_the_checksum_of_event_files_is_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def test_an_event_file_holds_every_scalar_with_its_step(tmp_path: Path) -> None:
    events = EventFile(tmp_path)
    events.write(1, {"loss": 0.5, "reward/mean": 0.25})
    events.write(300, {"loss": -1.0})
    events.close()
    found = [(fields[2], fields) for fields in map(protobuf, records(tmp_path))]
    assert found[0][1][3] == [b"brain.Event:2"]
    points = [(step[0], scalars(fields[5][0])) for step, fields in found if 5 in fields]
    assert points == [(1, {"loss": 0.5, "reward/mean": 0.25}), (300, {"loss": -1.0})]


def test_a_resumed_run_hides_what_comes_after_its_checkpoint(tmp_path: Path) -> None:
    EventFile(tmp_path, first_step=7).close()
    _, start = map(protobuf, records(tmp_path))
    assert start[2] == [7]
    assert protobuf(start[7][0]) == {1: [1]}


def records(folder: Path) -> list[bytes]:
    """The records of the one event file in `folder`, their checksums checked."""
    (file,) = folder.iterdir()
    data, out = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = data[12 : 12 + length]
        for part, stored in ((data[:8], data[8:12]), (event, data[12 + length : 16 + length])):
            crc = crc32c(part)
            assert struct.unpack("<I", stored)[0] == (((crc >> 15) | (crc << 17) & 0xFFFFFFFF) + 0xA282EAD8) % 2**32
        out.append(event)
        data = data[16 + length :]
    return out


def protobuf(data: bytes) -> dict[int, list[Any]]:
    """The fields of a protobuf message by number; strings and messages as bytes."""
    fields: dict[int, list[Any]] = {}
    while data:
        key, data = varint(data)
        if key & 7 == 0:
            value, data = varint(data)
        else:
            size, data = (8, data) if key & 7 == 1 else (4, data) if key & 7 == 5 else varint(data)
            value, data = data[:size], data[size:]
        fields.setdefault(key >> 3, []).append(value)
    return fields


def varint(data: bytes) -> tuple[int, bytes]:
    value = shift = 0
    for position, byte in enumerate(data):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, data[position + 1 :]
    raise AssertionError("varint without an end")


def scalars(summary: bytes) -> dict[str, float]:
    values = map(protobuf, protobuf(summary)[1])
    return {value[1][0].decode(): struct.unpack("<f", value[2][0])[0] for value in values}


def test_wandb_that_is_not_installed_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MetricsError, match=r"logging.wandb_project='p'.*asyncrl\[tracking\]"):
        WandbSink("p", tmp_path, ExperimentConfig())
