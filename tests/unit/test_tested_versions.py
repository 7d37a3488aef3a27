"""What `make setup` installs is what was tested: no release of somebody else's package changes it in between."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = ("dev", "etcd")
"""Those of `make setup`."""


def test_every_package_that_is_asked_for_has_a_version_that_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(each for extra in EXTRAS for each in project["optional-dependencies"][extra])]
    lines = (ROOT / "launchers" / "tested.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    for requirement in map(Requirement, asked):
        if requirement.name != "torch":  # launchers/setup.sh names it, with the index that has the build without CUDA
            assert requirement.specifier.contains(versions[requirement.name]), requirement
