"""Imports that the garbage collector never looks at: what is made there is kept out of its way, what follows is not.

In processes of their own, as what is there then stays out of the collector's way.
"""

from __future__ import annotations

import subprocess
import sys

BEGIN = """
import gc
from asyncrl.runtime.process.worker import lasting_imports
"""
BIG = """
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
with lasting_imports():
    made = [[] for _ in range(100_000)]
assert collections == []
assert gc.get_freeze_count() > 100_000
later = [[] for _ in range(100_000)]
assert collections
"""
MISSING = """
try:
    with lasting_imports():
        import no_such_library
except ImportError:
    assert gc.isenabled()
"""


def check(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_is_collected_meanwhile_and_what_was_made_is_not_looked_at_again() -> None:
    check(BEGIN + BIG)


def test_the_collector_runs_again_after_an_import_that_failed() -> None:
    check(BEGIN + MISSING)
