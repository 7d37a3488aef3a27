"""Files of a run's folder that are damaged: each reader names them, leaves them out, or refuses; none fails."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.run_dir import DamagedFile
from asyncrl.launch.commands import attach, audit, dashboard, doctor, export, trace
from asyncrl.launch.train import summary_lines
from asyncrl.observe.doctor import examine
from asyncrl.observe.history import History
from asyncrl.runtime.trials.resume import check_run_files, newest_progress

NAMED = ("config.yaml", "metrics.jsonl", "summary.json", "books.json", "restarts.jsonl")
"""Files that a launch names if they are damaged; those below are checked by their checksums and seals."""
CHECKED = ("data_record.json", "lock", "secret", "ledger/000001.jsonl", "observed/master_worker-0.jsonl")
DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "random": lambda _: random.Random(1).randbytes(300),
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "binary": lambda data: data[:20] + b"\x00\xff\xfe\x80\n" + data[20:],
    "deep": lambda data: data + b"[" * 300_000 + b"\n",
    "a list": lambda _: b"[1, 2]\n",
    "a number": lambda _: b"7\n",
    "another mapping": lambda _: b'{"a": 1}\n',
    "a folder": lambda _: None,
}
HARMLESS = {  # what has no end of a line is taken for a line that a kill cut off; missing rows are a warning
    *((name, damage) for name in ("metrics.jsonl", "restarts.jsonl") for damage in ("cut", "empty", "random")),
    *((name, "another mapping") for name in ("config.yaml", "books.json", "restarts.jsonl")),
}


@pytest.fixture
def run_dir(recorded_run: Path) -> Path:
    """A run's folder whose metrics and summary have what a page shows."""
    file, summary = recorded_run / "metrics.jsonl", recorded_run / "summary.json"
    rows = [json.loads(line) | {"time/step_s": 1.0} for line in file.read_text().splitlines()]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"eval": {}}))
    return recorded_run


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [*NAMED, *CHECKED, "checkpoints/v2/state.json", "checkpoints/v2/manifest.json"])
def test_whatever_is_damaged_no_reader_fails_and_a_launch_names_it(
    run_dir: Path, tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_dir / name
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text('{"time": 1.0, "restarted": "rollout_worker/0", "reason": "a"}\n' * 2)
    made = DAMAGE[damage](file.read_bytes())
    if made is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(made)
    run, page = str(run_dir), str(tmp_path / "page.html")
    if name != "config.yaml" or damage != "a folder":  # then it is no run
        assert doctor.main([run], "asyncrl") in (0, 1)
        assert dashboard.main([run, "--report", page], "asyncrl") == 0
        assert isinstance(trace.main([run, "--out", str(tmp_path / "trace.json")], "asyncrl"), int)
    assert audit.main([run], "asyncrl") in (0, 1)
    assert attach.main([run], "asyncrl") != 0
    assert isinstance(export.main([run, str(tmp_path / "out")], "asyncrl"), int)
    assert summary_lines(run_dir)
    newest_progress(run_dir)
    refused = ""
    try:
        check_run_files(run_dir)
    except DamagedFile as error:
        refused = str(error)
    if name in NAMED and (name, damage) not in HARMLESS:
        assert refused.startswith(f"{file}: ")


def test_the_doctor_names_a_damaged_file(recorded_run: Path) -> None:
    with (recorded_run / "metrics.jsonl").open("ab") as stream:
        stream.write(b"\x00\xff\n")
    findings = {found.kind: found for found in examine(History(recorded_run)).findings}
    assert "metrics.jsonl has lines that are no row" in findings["damaged-files"].sentence
