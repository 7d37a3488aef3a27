"""The rules of the data order: which prompt has which place, who plays it, and that none of a shard was passed over."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from asyncrl.comm.ledger_lines import Admitted, Lent, RunSettings

_PROMPT_ID = re.compile(r"e(\d+)-(\d+)")
_WORKER = re.compile(r"[a-z_]+/\d+")


class DataOrder:
    """Holds the prompts of a ledger's lines, launch after launch, against the order that the settings give.

    Args:
        rows: of the training data; None where that is not known, and prompt ids cannot be checked.
        report: takes what is wrong with the line at hand.
    """

    def __init__(self, rows: int | None, report: Callable[[str], None]) -> None:
        self._rows, self._report = rows, report
        self._orders: dict[str, int] = {}  # of all lineages; what follows is of this one
        self._settings: RunSettings | None = None
        self._lineage = 0
        self._admitted: set[int] = set()
        self._last: dict[int, int] = {}  # by shard the last place that its own worker was admitted at
        self._lent: dict[int, str] = {}  # by place the worker that joined
        self._used_before: set[int] = set()

    def begin(self, settings: RunSettings, lineage: int, used: Iterable[str]) -> None:
        """A launch begins; the prompts `used` are trained, or dropped for good."""
        self._settings, self._lineage = settings, lineage
        self._last, self._lent = {}, {}
        self._admitted, self._used_before = set(), {self._orders[prompt] for prompt in used}

    def check_prompt(self, prompt: str, order: int) -> None:
        """A prompt is where it was before, and its id is the one that the seed gives its place."""
        match = _PROMPT_ID.fullmatch(prompt)
        known = self._orders.setdefault(prompt, order)
        if known != order or order < 0:
            self._report(f"prompt {prompt} is at place {order} of the data order, and was at {known}")
        if match is None:
            self._report(f"prompt {prompt!r}: ids are e<epoch>-<row>")
        elif self._rows and self._settings and self._settings.workers and min(order, self._settings.seed) >= 0:
            epoch, position = divmod(order, self._rows)
            row = int(_permutation(self._rows, self._settings.seed, epoch)[position])
            if (epoch, row) != (int(match[1]), int(match[2])):
                self._report(f"place {order} of the data order is of prompt e{epoch}-{row}, not of {prompt}")

    def admit(self, line: Admitted) -> None:
        """A prompt is played by the worker of its shard, or by one without a shard that it was lent to last."""
        workers = self._workers
        if not _WORKER.fullmatch(line.worker):
            self._report(f"rollout {line.rollout} runs on {line.worker!r}, which names no worker")
        elif workers and (index := _index(line.worker)) < workers:
            if index != line.order % workers:
                self._report(f"prompt {line.prompt} (order {line.order}) is not of the shard of {line.worker}")
            self._last[index] = max(line.order, self._last.get(index, -1))
        elif workers and self._lent.get(line.order) != line.worker:
            self._report(f"prompt {line.prompt} (order {line.order}) was not lent to {line.worker}, which has no shard")
        self._admitted.add(line.order)

    def lend(self, line: Lent) -> None:
        """A prompt is lent to a worker that joined."""
        self.check_prompt(line.prompt, line.order)
        if not _WORKER.fullmatch(line.worker) or _index(line.worker) < self._workers:
            self._report(f"prompt {line.prompt} was lent to {line.worker!r}, which names no worker that joined")
        self._lent[line.order] = line.worker

    def check_shards(self) -> None:
        """No prompt of a shard was passed over in this lineage: all before its worker's last are admitted or lent, or
        were used.
        """
        workers = self._workers
        if workers < 1:
            return
        last = self._last
        seen = Counter(
            order % workers
            for order in self._admitted | self._used_before | self._lent.keys()
            if 0 <= order < last.get(order % workers, 0)  # counted: a doctored place may be beyond all bounds
        )
        for worker, newest in sorted(last.items()):
            before_it = max(0, -((worker - newest) // workers))
            if (missing := before_it - seen[worker]) > 0:
                places = (order for order in range(worker, newest, workers) if not self._is_seen(order))
                some = f"{list(islice(places, 5))}{' ...' if missing > 5 else ''}"
                self._report(
                    f"places {some} of the data order ({missing}) were passed over in lineage {self._lineage}: "
                    "their prompts were neither run nor used before"
                )

    @property
    def _workers(self) -> int:
        return self._settings.workers if self._settings else 0

    def _is_seen(self, order: int) -> bool:
        return order in self._admitted or order in self._used_before or order in self._lent


def _index(worker: str) -> int:
    return int(worker.partition("/")[2])


@lru_cache(maxsize=8)
def _permutation(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch's rows, as `docs/ledger.md` states it."""
    return np.random.default_rng([seed, epoch]).permutation(rows)
