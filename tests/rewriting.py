"""Each worker of pytest rewrites the assertions of a share of a fresh clone's test files.

pytest rewrites a file when it imports it, and keeps the result beside it. All workers import all files in one order, at
the same time, so each would rewrite nearly all of them. Here each begins with files of its own and then finds what the
others have written. Where one is late, another rewrites the file as well.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def rewrite_a_share(arguments: Iterable[str]) -> None:
    """Rewrite this worker's share of the test files in the folders `arguments`."""
    if not (worker := os.environ.get("PYTEST_XDIST_WORKER")) or sys.dont_write_bytecode:
        return
    hook = next(finder for finder in sys.meta_path if type(finder).__name__ == "AssertionRewritingHook")
    files = sorted(file for folder in arguments for file in Path(folder).rglob("test_*.py"))
    for file in files[int(worker.removeprefix("gw")) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
        spec = hook.find_spec(file.stem, [str(file.parent)])
        assert spec is not None, file
        assert spec.loader is not None, file
        module = ModuleType(file.stem)
        module.__spec__ = spec
        module.__dict__["__builtins__"] = {}  # so that its first import ends it: it is rewritten by then
        with contextlib.suppress(ImportError):
            spec.loader.exec_module(module)
