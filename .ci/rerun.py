"""Run the whole runs that failed in `make test` once more, each alone, and print both results under FLAKY.

    python .ci/rerun.py [CACHE, default .pytest_cache]

Exits with 0 where at most `FORGIVEN` whole runs (tests/e2e, tests/faults) failed, nothing else did, and each passes
now. A whole run is some ten processes on two shared cores; a unit or integration test has no such excuse.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FORGIVEN = 2
WHOLE_RUNS = ("tests/e2e/", "tests/faults/")


def main(cache: Path) -> int:
    """Returns the exit code."""
    file = cache / "v" / "cache" / "lastfailed"
    failed = sorted(json.loads(file.read_text())) if file.is_file() else []
    others = [test for test in failed if not test.startswith(WHOLE_RUNS)]
    if not failed or others or len(failed) > FORGIVEN:
        print(
            f"FLAKY: nothing is run again: {len(failed)} tests failed, {len(others)} of them no whole runs", flush=True
        )
        return 1
    code = 0
    for test in failed:
        print(f"FLAKY {test}\nFLAKY   in the suite: failed, see above", flush=True)
        again = subprocess.run([sys.executable, "-m", "pytest", "-q", test], check=False).returncode
        print(f"FLAKY   alone: {'passed' if again == 0 else 'failed'}", flush=True)
        code = code or again
    return code


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:2] or [".pytest_cache"])))
