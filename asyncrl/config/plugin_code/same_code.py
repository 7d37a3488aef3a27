"""Checksums of the sources that a process runs, to detect hosts with different code.

Sources that may differ between hosts are compared: asyncrl itself, the packages that settings name, and every
module that is not installed (found by PYTHONPATH or in the current folder). Other packages may differ from host to
host. Code files that settings name by path are copied to each host and need no comparison.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Collection, Mapping
from pathlib import Path

import xxhash

from asyncrl.config.plugin_code.import_paths import FILE_MODULES, locate

_STANDARD_LIBRARY = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
_INSTALLED = {"site-packages", "dist-packages"}
_OF_THE_HOST = {"__main__", "__mp_main__", "sitecustomize", "usercustomize"}
_ASYNCRL = "asyncrl"
_PATH_AT_START = frozenset(sys.path)  # later entries were added by user code


def loaded_sources(packages: Collection[str] = ()) -> dict[str, str]:
    """Return checksums of the loaded modules' source files by module name: XXH3, sixteen hexadecimal digits.

    Args:
        packages: top-level packages that are compared even if they are installed.
    """
    compared = {_ASYNCRL, *packages}
    found = {}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or spec.name != name or name in _OF_THE_HOST or name.startswith(FILE_MODULES):
            continue
        file = Path(spec.origin or "")
        if file.suffix == ".py" and file.is_file() and (name.partition(".")[0] in compared or not _is_installed(file)):
            found[name] = _sum(file)
    return found


class KnownSources:
    """The sources of this host. Each keeps the state it had when this process first read it.

    So later changes are detected as differences, until the process is replaced.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Path, str] | None] = {}

    def differences(self, sums: Mapping[str, str]) -> dict[str, str]:
        """Return the modules that differ from those with these checksums on another host, each with the reason."""
        found = {}
        for name, sum_there in sorted(sums.items()):
            if name not in self._known:
                self._known[name] = _here(name)
            here = self._known[name]
            if here is None:
                found[name] = "is not there"
            elif here[1] != sum_there:
                found[name] = f"differs from {here[0]}"
        return found


def how_found(name: str) -> str:
    """Return a hint for a loaded module that differs elsewhere, if code here added its folder to `sys.path`."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        return ""
    root = Path(file).parents[name.count(".") + hasattr(module, "__path__")]
    if any(Path(folder).absolute() == root for folder in set(sys.path) - _PATH_AT_START):
        return f" (found here in {root}, which code added to sys.path: put that folder on PYTHONPATH)"
    return ""


def _here(module: str) -> tuple[Path, str] | None:
    source = locate(module)
    if source is not None and source.is_dir():
        source /= "__init__.py"
    return None if source is None or not source.is_file() else (source, _sum(source))


def _is_installed(file: Path) -> bool:
    return not _INSTALLED.isdisjoint(file.parts) or not _STANDARD_LIBRARY.isdisjoint(file.resolve().parents)


def _sum(file: Path) -> str:
    return xxhash.xxh3_64(file.read_bytes()).hexdigest()
