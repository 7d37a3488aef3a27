"""SGLang's processes are forked where it would spawn them: each import of SGLang takes ten seconds of a processor.

Tests put this folder on the `PYTHONPATH` of its command, unless ASYNCRL_COLD_TESTS is set.
"""

from __future__ import annotations

import multiprocessing

multiprocessing.set_start_method("fork")
multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
