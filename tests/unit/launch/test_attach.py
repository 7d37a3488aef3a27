"""`attach` shows the output of a detached run as it is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec import structs

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import run_dir_of
from asyncrl.launch.commands import attach
from asyncrl.runtime.trials.claim import TrialClaim


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


@pytest.mark.parametrize("where", ["nothing", "ended", "terminal", "container"])
def test_a_run_that_cannot_be_attached_to_is_refused_with_what_it_is(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ExperimentConfig(fileroot=str(tmp_path))
    said = "no run of this user has this folder"
    if where != "nothing":
        claim = TrialClaim.take(config, detached=where == "container")
        if where == "container":
            elsewhere = structs.replace(claim.holder, machine=f"{claim.holder.machine.partition('/')[0]}/1")
            os.ftruncate(claim.lock, 0)
            os.pwrite(claim.lock, elsewhere.encode().encode(), 0)
        if where == "ended":
            claim.release()
        said = {
            "ended": "no run is active there",
            "terminal": "runs there in its own terminal",
            "container": "in another container, which this one cannot signal; attach there",
        }[where]
    assert attach.main([str(run_dir_of(config))], "asyncrl") == 2
    assert said in capsys.readouterr().err
    if where in ("terminal", "container"):
        claim.release()
