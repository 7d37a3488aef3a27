"""`install verifiers VERSION FOLDER EXTRA ...`, with programs in place of Python that note what they are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "launchers" / "install_verifiers.sh"
PYTHON = """#!/bin/sh
echo "$@" >> "{folder}/asked"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;
  "-c import sys; "*) exit {old};;
  "- "*) exec {real} "$@";;
esac
"""
METADATA = "Metadata-Version: 2.1\nName: verifiers\nVersion: 0.4.0\nProvides-Extra: harbor\nProvides-Extra: openenv\n"


class Installer:
    """Installs into `venv` with a Python that is older than 3.12, or not; `asked` are the commands that it got."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.venv = folder, folder / "venv"
        self.old = True
        known = folder / "verifiers-0.4.0.dist-info"
        known.mkdir()
        (known / "METADATA").write_text(METADATA)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.setenv("PATH", os.defpath)  # without uv

    def __call__(self, version: str, *extras: str) -> subprocess.CompletedProcess[str]:
        python = self.folder / "python"
        python.write_text(PYTHON.format(folder=self.folder, old=int(self.old), real=sys.executable))
        python.chmod(0o700)
        (self.folder / "asked").write_text("")
        return subprocess.run(
            ["bash", str(SCRIPT), version, str(self.venv), *extras],
            env=os.environ | {"PYTHON": str(python)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def asked(self) -> str:
        return (self.folder / "asked").read_text()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    return Installer(tmp_path, monkeypatch)


def test_extras_are_installed_by_name_with_uv_and_once(install: Installer) -> None:
    install.old = False
    assert install("0.4.0", "openenv", "harbor").stdout.strip() == str(install.venv / "bin" / "python")
    assert "install --quiet --disable-pip-version-check verifiers[harbor,openenv]==0.4.0 uv\n" in install.asked
    assert install("0.4.0", "harbor", "openenv").returncode == 0
    assert install.asked == "", "the same again"
    assert install("0.4.0", "openenv").returncode == 0
    assert "verifiers[openenv]==0.4.0 uv\n" in install.asked


def test_the_classic_api_needs_no_uv(install: Installer) -> None:
    assert install("0.2.1").returncode == 0
    assert "verifiers==0.2.1\n" in install.asked


def test_an_extra_that_there_is_not_and_one_for_a_newer_python_are_refused_by_name(install: Installer) -> None:
    ended = install("0.4.0", "openenw")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "no extra openenw; choose from harbor, openenv" in ended.stderr
    ended = install("0.4.0", "harbor")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "harbor needs Python 3.12" in ended.stderr
    assert "venv" not in install.asked
