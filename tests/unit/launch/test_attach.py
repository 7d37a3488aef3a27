"""`attach` shows the output of a detached run as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.launch.commands import attach


def test_a_character_that_two_reads_cut_is_shown_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "launcher.log"
    written = "η = 1\n".encode()
    file.write_bytes(written[:1])
    log = attach._Log(file)
    log.show()
    file.write_bytes(written)
    log.show()
    assert capsys.readouterr().out == "η = 1\n"


def test_a_line_that_two_reads_cut_is_returned_whole(tmp_path: Path) -> None:
    """So that `started` is seen, at the beginning of a line only."""
    file = tmp_path / "launcher.log"
    written = b"all have started 1\nstarted 2\n"
    log, lines = attach._Log(file), list[str]()
    for end in (9, 22, len(written)):
        file.write_bytes(written[:end])
        lines += log.show()
    assert lines == ["all have started 1", "started 2"]
