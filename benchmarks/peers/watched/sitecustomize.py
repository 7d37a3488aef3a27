"""First on PYTHONPATH: each process counts the processor seconds of its observing, for `overlap.py --observing`.

At its end it writes them into a file of its own in the folder `OBSERVING_FOLDER`. Python imports a module of this name
when it begins.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from after_import import after_import

FOLDER = "OBSERVING_FOLDER"
OF_THREAD = ("line", "_ping")
"""What the observer's own thread does; all else delays the process's work."""
INLINE = ("span", "stage", "_pong")


def _watched(module: ModuleType) -> None:
    seconds: Counter[str] = Counter()
    observer = module.Observer

    def counted(name: str, kind: str) -> None:
        method: Callable[..., Any] = getattr(observer, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return method(self, *args, **kwargs)
            finally:
                seconds[kind] += time.thread_time() - begin  # type: ignore[assignment]

        setattr(observer, name, call)

    for name in OF_THREAD:
        counted(name, "thread")
    for name in INLINE:
        counted(name, "inline")
    write, close = observer._write, observer.close

    def written(self: Any, line: dict[str, Any]) -> None:
        begin = time.thread_time()
        write(self, line)
        if "span" not in line:  # that of a span is counted with it
            seconds["thread"] += time.thread_time() - begin  # type: ignore[assignment]

    def closed(self: Any) -> None:
        close(self)
        told = {"process": self._file.stem, **seconds}
        (Path(os.environ[FOLDER]) / f"{os.getpid()}.json").write_text(json.dumps(told))

    observer._write, observer.close = written, closed


after_import({"asyncrl.observe.observer": _watched})
