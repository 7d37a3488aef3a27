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
