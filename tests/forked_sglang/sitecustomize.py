"""SGLang's processes are forked where it would spawn them: each import of SGLang takes ten seconds of a processor. Of
its two hundred models it imports those that tests serve.

Tests put this folder on the `PYTHONPATH` of its command, unless ASYNCRL_COLD_TESTS is set.
"""

from __future__ import annotations

import multiprocessing
import os
import sysconfig
from pathlib import Path

multiprocessing.set_start_method("fork")
multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]

models = Path(sysconfig.get_paths()["purelib"], "sglang", "srt", "models").glob("*.py")
others = [model.stem for model in models if not model.stem.startswith(("qwen", "mixtral"))]
os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))
