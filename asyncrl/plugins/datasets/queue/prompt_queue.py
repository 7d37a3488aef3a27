"""The waiting prompts: those of the data order that are neither used nor live.

A prompt is *used* once it was trained or dropped for good, and *live* while a rollout of it runs or waits to be
trained, one at most. When its rollout leaves and it is not used, it waits again.

The prompt with the lowest place comes next. A first attempt has the place of its order in the data. A later attempt,
with other random numbers, has its place at the end of its epoch or of a later one: under the same weights it would only
fail again. So the place follows from order and attempt alone. The time at which rollouts end does not change a place,
so it does not change a batch. Places need not be stored to hand out the same prompts again.

    place(order, attempt) = (order, 1)                                     attempt 0
                            ((order // rows + attempt) * rows, 0)          later attempts

Below a cursor every prompt is used, live, or *back* (waiting for another attempt). So only the used prompts above the
cursor must be stored.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple


class NextTry(NamedTuple):
    """The next attempt at a prompt: the prompt at `order`, attempt number `attempt`, after `failures` failed
    attempts.
    """

    order: int
    attempt: int = 0
    failures: int = 0


class PromptQueue:
    """The prompts that are neither used nor live, in data order. Pure state.

    Args:
        rows: number of rows of the dataset, which make an epoch.
        used: orders of the used prompts.
        retries: by order, attempt and failures of waiting prompts that were tried before.
        end: no prompt of this order or a later one is begun (`DataOrder.end`). Once all before it were begun, further
            attempts come at once.
    """

    def __init__(
        self,
        rows: int,
        used: Iterable[int] = (),
        retries: Mapping[int, tuple[int, int]] | None = None,
        end: int | None = None,
    ) -> None:
        self.rows, self._end = rows, math.inf if end is None else end
        self.live: set[int] = set()
        self.back: dict[int, tuple[int, int]] = {}
        self._cursor = 0
        self._used = set(used)
        self._heap: list[tuple[tuple[int, int], int]] = []
        for order, (attempt, failures) in (retries or {}).items():
            self._wait(NextTry(order, attempt, failures))
        self._advance()

    def peek(self, may: Callable[[int], bool] = lambda order: True) -> NextTry | None:
        """Return the first waiting prompt that `may` start now; None if none may. `may` is called for retried prompts
        only.
        """
        passed_over, ended = [], self._cursor >= self._end
        try:
            while self._heap and (ended or self._heap[0][0] < (self._cursor, 1)):
                place, order = self._heap[0]
                turn = self.waiting(order)
                if turn is not None and self._place(turn.order, turn.attempt) == place:
                    if may(order):
                        return turn
                    passed_over.append(heapq.heappop(self._heap))
                else:
                    heapq.heappop(self._heap)  # used or live by now, or replaced by another attempt
            return None if ended else NextTry(self._cursor)
        finally:
            for entry in passed_over:
                heapq.heappush(self._heap, entry)

    def next(self) -> NextTry:
        """Take the first prompt that waits, of which there must be one; it is live from now on."""
        turn = self.peek()
        assert turn is not None, "no prompt waits"
        self.enter(turn.order)
        return turn

    def waiting(self, order: int) -> NextTry | None:
        """Return the prompt at `order` if it waits for another attempt; None if it does not, or was never begun."""
        tries = self.back.get(order)
        return None if tries is None else NextTry(order, *tries)

    def enter(self, order: int) -> None:
        """Record that a rollout of the prompt is live, whichever manager started it."""
        self.live.add(order)
        self.back.pop(order, None)
        self._advance()

    def leave(self, turn: NextTry) -> None:
        """Record that the prompt's rollout is no longer live; the prompt waits for another attempt, `turn`."""
        self.live.remove(turn.order)
        self._wait(turn)

    def use(self, order: int) -> None:
        """Record that the prompt's rollout is no longer live, and the prompt used."""
        self.live.remove(order)
        if order >= self._cursor:
            self._used.add(order)

    def is_used(self, order: int) -> bool:
        """True if the prompt was trained or dropped for good."""
        return order in self._used or (order < self._cursor and order not in self.live and order not in self.back)

    def _place(self, order: int, attempt: int) -> tuple[int, int]:
        return ((order // self.rows + attempt) * self.rows, 0) if attempt else (order, 1)

    def _advance(self) -> None:
        """Bring the cursor to the first prompt that is neither used, nor live, nor back."""
        while self._cursor in self._used or self._cursor in self.live or self._cursor in self.back:
            self._used.discard(self._cursor)
            self._cursor += 1

    def _wait(self, turn: NextTry) -> None:
        if turn.order >= self._cursor and not turn.attempt and not turn.failures:
            return  # the cursor will reach it
        self.back[turn.order] = turn.attempt, turn.failures
        heapq.heappush(self._heap, (self._place(turn.order, turn.attempt), turn.order))
