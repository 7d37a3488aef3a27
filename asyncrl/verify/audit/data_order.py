"""The rules of the data order: each prompt has its place, and no prompt was passed over."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from asyncrl.comm.ended_rollouts.ledger_lines import Admitted, RunSettings

_PROMPT_ID = re.compile(r"e(\d+)-(\d+)")
_WORKER = re.compile(r"[a-z_]+/\d+")


class DataOrder:
    """Compares the prompts in a ledger's lines, launch by launch, with the order given by the settings.

    Args:
        rows: number of rows of the training data; None if unknown, so that prompt ids cannot be checked.
        report: called with an error in the current line.
    """

    def __init__(self, rows: int | None, report: Callable[[str], None]) -> None:
        self._rows, self._report = rows, report
        self._orders: dict[str, int] = {}  # by prompt, over all lineages; the fields below are for this lineage only
        self._settings: RunSettings | None = None
        self._lineage = 0
        self._admitted: set[int] = set()
        self._newest = -1
        self._used_before: set[int] = set()

    def begin(self, settings: RunSettings, lineage: int, used: Iterable[str]) -> None:
        """Begin a launch. The prompts in `used` were trained, dropped for good, or have a later place now."""
        self._settings, self._lineage = settings, lineage
        self._newest = -1
        self._admitted, self._used_before = set(), {self._orders[prompt] for prompt in used}

    def check_prompt(self, prompt: str, order: int) -> None:
        """Check that a prompt has the same place as before, and that the seed gives this place its id."""
        match = _PROMPT_ID.fullmatch(prompt)
        known = self._orders.setdefault(prompt, order)
        if known != order or order < 0:
            self._report(f"prompt {prompt} is at place {order} of the data order, and was at {known}")
        if match is None:
            self._report(f"prompt {prompt!r}: ids are e<epoch>-<row>")
        elif self._rows and self._settings and self._settings.workers and min(order, self._settings.seed) >= 0:
            epoch, position = divmod(order, self._rows)
            seed, shuffled = self._settings.seed, self._settings.shuffle
            row = int(_permutation(self._rows, seed, epoch)[position]) if shuffled else position
            if (epoch, row) != (int(match[1]), int(match[2])):
                self._report(f"place {order} of the data order is of prompt e{epoch}-{row}, not of {prompt}")

    def admit(self, line: Admitted) -> None:
        """Add an admitted prompt."""
        if not _WORKER.fullmatch(line.worker):
            self._report(f"rollout {line.rollout} runs on {line.worker!r}, which is not the name of a worker")
        self._admitted.add(line.order)
        if not line.adopted:
            self._newest = max(self._newest, line.order)

    def check_none_passed_over(self) -> None:
        """Check that all prompts before the last one admitted in this lineage were also admitted in it, or used before.

        Rollouts adopted from a dead manager do not count as the last: earlier prompts may have been lost with that
        manager, and wait.
        """
        newest = self._newest
        if self._settings is None or not self._settings.workers or newest < 0:
            return
        seen = {order for order in self._admitted | self._used_before if 0 <= order < newest}
        if (missing := newest - len(seen)) > 0:  # counted, since a forged place may be beyond all bounds
            places = list(islice((order for order in range(newest) if order not in seen), 5))
            some = f"{places}{' ...' if missing > 5 else ''}"
            self._report(
                f"places {some} of the data order ({missing}) were passed over in lineage {self._lineage}: "
                "their prompts were neither run nor used before"
            )


@lru_cache(maxsize=8)
def _permutation(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of an epoch's rows, as `docs/ledger.md` defines it."""
    return np.random.default_rng([seed, epoch]).permutation(rows)
