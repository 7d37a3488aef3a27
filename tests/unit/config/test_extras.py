"""The extras in pyproject.toml: pip can resolve them beside asyncrl, and every one that a text proposes is there."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
NOT_INSTALLED_HERE = {"tracking", "verifiers-classic", "verifiers-v1"}
"""Too large for the tests' environment; the last two are installed by launchers/install_verifiers.sh."""
_PROPOSED = re.compile(r"asyncrl\[([\w-]+)\]|the `([\w-]+)`\s+extra|the extra `([\w-]+)`")


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - NOT_INSTALLED_HERE))
def test_pip_resolves_the_extra_beside_asyncrl(extra: str) -> None:
    """The packages installed here satisfy asyncrl and the extra; SGLang, for example, pins another transformers."""
    own = {Requirement(text).name for text in PROJECT["dependencies"]}
    for wanted in map(Requirement, EXTRAS[extra]):
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            if extra != "dev":
                raise
            pytest.skip(f"{wanted.name} is not installed")  # as tests say that need it
        assert wanted.specifier.contains(version), wanted
        for of_it in map(Requirement, importlib.metadata.requires(wanted.name) or ()):
            if of_it.name in own and (of_it.marker is None or of_it.marker.evaluate({"extra": ""})):
                assert of_it.specifier.contains(importlib.metadata.version(of_it.name)), f"{wanted} wants {of_it}"


def texts() -> Iterator[Path]:
    yield ROOT / "README.md"
    for folder, pattern in (("asyncrl", "*.py"), ("docs", "*.md"), ("launchers", "*.sh"), ("experiments", "*.yaml")):
        yield from (ROOT / folder).rglob(pattern)


def test_every_extra_that_a_text_proposes_is_there() -> None:
    proposed = {
        (str(file.relative_to(ROOT)), name)
        for file in texts()
        for groups in _PROPOSED.findall(file.read_text(encoding="utf-8"))
        for name in groups
        if name
    }
    assert len(proposed) > 10
    assert sorted(text for text in proposed if text[1] not in EXTRAS) == []
