"""Full logs are put aside, and whoever has one open goes on writing to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from asyncrl.runtime.trials.run_output import rotate

WRITER = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def test_a_process_goes_on_writing_to_its_log(tmp_path: Path) -> None:
    log, aside = tmp_path / "worker-0.log", tmp_path / "worker-0.log.1"
    (tmp_path / "small-0.log").write_text("1234567890")
    with log.open("ab") as file:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=file, text=True, bufsize=1
        )
    assert writer.stdin is not None

    def write(text: str) -> None:
        assert writer.stdin is not None
        writer.stdin.write(f"{text}\n")
        writer.stdin.flush()

    write("a line that is too long")
    while not log.stat().st_size:
        assert writer.poll() is None
    assert rotate(tmp_path, limit=10) == [log]
    write("next")
    writer.stdin.close()
    assert writer.wait(60) == 0
    assert (aside.read_text(), log.read_text()) == ("a line that is too long\n", "next\n")
    assert rotate(tmp_path, limit=10) == []
    assert (tmp_path / "small-0.log").read_text() == "1234567890"


def test_a_log_that_cannot_be_put_aside_stays(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text("much too long")
    (tmp_path / "worker-0.log.1").mkdir()
    assert rotate(tmp_path, limit=10) == []
    assert (tmp_path / "worker-0.log").read_text() == "much too long"
