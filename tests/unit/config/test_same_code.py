"""Code of two hosts is compared by the sources that a process has loaded, wherever they lie."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.config.plugin_code.same_code import KnownSources, how_found, loaded_sources


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with a package of the user's, and a package that reads as installed."""
    mine, installed = tmp_path / "mine", tmp_path / "site-packages"
    for package in (mine / "same_code_mine", installed / "same_code_installed"):
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "rewards.py").write_text("from . import helper\n")
        (package / "helper.py").write_text("VALUE = 1\n")
        monkeypatch.syspath_prepend(package.parent)
    for name in ("same_code_mine.rewards", "same_code_installed.rewards"):
        importlib.import_module(name)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("same_code_")]:
        del sys.modules[name]


def of_the_test(sums: dict[str, str]) -> dict[str, str]:
    return {name: sum_ for name, sum_ in sums.items() if name.startswith("same_code_")}


def of(package: str, sums: dict[str, str]) -> list[str]:
    return sorted(name for name in sums if name.partition(".")[0] == package)


def test_compared_is_asyncrl_what_is_installed_nowhere_and_what_settings_name(code: Path) -> None:
    sums = loaded_sources()
    assert of("same_code_mine", sums) == ["same_code_mine", "same_code_mine.helper", "same_code_mine.rewards"]
    assert "asyncrl.config.plugin_code.same_code" in sums
    assert not {"json", "pytest", "same_code_installed.rewards"} & sums.keys()
    named = loaded_sources(["same_code_installed"])
    assert of("same_code_installed", named) == [
        "same_code_installed",
        "same_code_installed.helper",
        "same_code_installed.rewards",
    ]


def test_what_is_the_same_there_makes_no_difference_and_what_is_not_is_named(code: Path) -> None:
    sums, known = of_the_test(loaded_sources(["same_code_installed"])), KnownSources()
    assert len(sums) == 6
    assert known.differences(sums) == {}
    helper = code / "mine" / "same_code_mine" / "helper.py"
    helper.write_text("VALUE = 2\n")
    (code / "site-packages" / "same_code_installed" / "helper.py").unlink()
    assert KnownSources().differences(sums) == {
        "same_code_installed.helper": "is not there",
        "same_code_mine.helper": f"differs from {helper}",
    }
    assert known.differences(sums) == {}  # as they were
    assert known.differences(of_the_test(loaded_sources())) == {"same_code_mine.helper": f"differs from {helper}"}
    shutil.rmtree(code / "mine" / "same_code_mine")
    sys.modules.pop("same_code_mine")
    assert KnownSources().differences({"same_code_mine": "0"}) == {"same_code_mine": "is not there"}


def test_what_was_loaded_by_its_file_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward(data, completion): return 0.0\n")
    before = loaded_sources().keys()
    load_plugin(f"{tmp_path / 'reward.py'}:reward")
    assert loaded_sources().keys() == before


def test_of_a_module_that_differs_the_folder_is_told_that_code_added_to_the_path(code: Path) -> None:
    reported = f" (found here in {code / 'mine'}, which code added to sys.path: put that folder on PYTHONPATH)"
    assert how_found("same_code_mine.helper") == how_found("same_code_mine") == reported
    assert how_found("asyncrl.config.plugin_code.same_code") == how_found("sys") == how_found("same_code_nowhere") == ""
