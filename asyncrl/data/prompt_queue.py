"""Which prompt comes next: the order of the data, the used prompts, and the waiting ones.

An epoch is a permutation of the dataset's rows that depends on (seed, epoch) alone; without `dataset.shuffle` it is
their order in the file. The epochs follow each other, so every prompt has a global position, its *order* = epoch ·
num_rows + position in the epoch, and a name, `e<epoch>-<row>`. Each prompt of an epoch occurs exactly once.

Example, 3 rows, epochs (2 0 1) and (0 1 2): e0-2, e0-0, e0-1, e1-0, e1-1, ... (orders 0, 1, 2, 3, 4).

A prompt is *used* once it was trained or dropped for good, and *live* while a rollout of it runs or waits to be
trained, one at most. When its rollout leaves and it is not used, it waits again.

The prompt with the lowest position comes next. A first attempt has the position of its order in the data. A later
attempt, with other random numbers, has its position at the end of its epoch or of a later one: under the same weights
it would only fail again. So the position follows from order and attempt alone. The time at which rollouts end does not
change a position, so it does not change a batch. Positions need not be stored to hand out the same prompts again.

    position(order, attempt) = (order, 1)                                  attempt 0
                               ((order // rows + attempt) * rows, 0)       later attempts

Below a cursor every prompt is used, live, or *back* (waiting for another attempt). So only the used prompts above the
cursor must be stored.
"""

from __future__ import annotations

import base64
import heapq
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.api.generation import seed_from

_PROMPT_ID = re.compile(r"e(0|[1-9]\d*)-(0|[1-9]\d*)")
_MAX_ROW = 1 << 32


def parse_prompt_id(prompt_id: str) -> tuple[int, int] | None:
    """Return the epoch and row of the prompt id `e<epoch>-<row>`; None if it is of another form."""
    match = _PROMPT_ID.fullmatch(prompt_id)
    if match is None or int(match[2]) >= _MAX_ROW:
        return None
    return int(match[1]), int(match[2])


def epoch_of(prompt_id: str) -> int:
    """Return the epoch, from 0, of the prompt `e<epoch>-<row>`; 0 for names of another form."""
    number = prompt_id[1:].partition("-")[0]
    return int(number) if number.isdecimal() else 0


def epoch_order(num_rows: int, seed: int, epoch: int, *, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the permutation of `num_rows` rows in which epoch `epoch` visits them; shape `[num_rows]`."""
    if not shuffle:
        return np.arange(num_rows)
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def prompt_seed(run_seed: int, order: int, attempt: int = 0) -> int:
    """Return the base sampling seed of an attempt at the prompt at `order`. Each sample of the group derives its seed
    from it.
    """
    return seed_from("prompt", run_seed, order, *([attempt] if attempt else []))


@dataclass(frozen=True, slots=True)
class PromptRef:
    """A prompt's name within the run, its position in the data order, its row in the dataset, and which attempt at it
    this is.
    """

    prompt_id: str
    order: int
    row: int
    attempt: int = 0


CACHED_EPOCHS = 4
"""Number of cached permutations. Most prompts are of the current epoch, and retried ones of the epoch before."""


class DataOrder:
    """Positions of the prompts in the order, of a dataset of `num_rows` rows (at least 1) under `seed`.

    Attributes:
        end: number of prompts in `epochs` epochs, after which the order ends; None: it has no end.
    """

    def __init__(self, num_rows: int, seed: int, *, shuffle: bool = True, epochs: float | None = None) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows is {num_rows}: the dataset needs at least one row")
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self.end = None if epochs is None else int(epochs * num_rows)
        self._permutations: dict[int, NDArray[np.int64]] = {}
        self._positions: dict[int, NDArray[np.int64]] = {}

    def ref(self, order: int) -> PromptRef:
        """Return the prompt at `order`, as its first attempt."""
        epoch, position = divmod(order, self.num_rows)
        row = int(self._permutation(epoch)[position])
        return PromptRef(f"e{epoch}-{row}", order, row)

    def order_of(self, prompt_id: str) -> int:
        """Return the order of `prompt_id`.

        Raises:
            ValueError: the id is not a prompt of this dataset.
        """
        parsed = parse_prompt_id(prompt_id)
        if parsed is None or parsed[1] >= self.num_rows:
            raise ValueError(f"prompt id {prompt_id!r} names no prompt of {self.num_rows} rows: ids are e<epoch>-<row>")
        epoch, row = parsed
        self._permutation(epoch)
        return epoch * self.num_rows + int(self._positions[epoch][row])

    def orders_of(self, used: UsedPrompts) -> NDArray[np.int64]:
        """Return the orders of `used` prompts, ascending."""
        found = [np.empty(0, np.int64)]
        for epoch in used.epochs:
            rows = np.zeros(self.num_rows, bool)
            rows[used.rows(epoch)] = True
            found.append(np.flatnonzero(rows[self._permutation(epoch)]) + epoch * self.num_rows)
        return np.concatenate(found)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            permutation = epoch_order(self.num_rows, self.seed, epoch, shuffle=self.shuffle)
            positions = np.empty_like(permutation)
            positions[permutation] = np.arange(self.num_rows)
            while len(self._permutations) >= CACHED_EPOCHS:
                oldest = min(self._permutations)
                del self._permutations[oldest], self._positions[oldest]
            self._permutations[epoch], self._positions[epoch] = permutation, positions
        return self._permutations[epoch]


class UsedPrompts:
    """A set of prompt ids that only grows, compact and ready for JSON.

    It is one bitmap of rows per epoch: a million rows take 125 kB, and compressed a finished epoch takes next to
    nothing. Ids of another form than `e<epoch>-<row>` (a user's own stream) are kept as they are.
    """

    def __init__(self, prompt_ids: Iterable[str] = ()) -> None:
        self._rows: dict[int, bytearray] = {}
        self._packed: dict[int, str] = {}  # of unchanged epochs, so that only changed ones are packed again
        self._others: set[str] = set()
        self._count = 0
        for prompt_id in prompt_ids:
            self.add(prompt_id)

    def add(self, prompt_id: str) -> None:
        """Add an id. Adding it again has no effect."""
        if prompt_id in self:
            return
        self._count += 1
        parsed = parse_prompt_id(prompt_id)
        if parsed is None:
            self._others.add(prompt_id)
            return
        epoch, row = parsed
        self._packed.pop(epoch, None)
        bitmap = self._rows.setdefault(epoch, bytearray())
        byte = row >> 3
        if byte >= len(bitmap):
            bitmap.extend(bytes(max(byte + 1 - len(bitmap), len(bitmap))))  # at least doubled: growing stays linear
        bitmap[byte] |= 1 << (row & 7)

    def __contains__(self, prompt_id: object) -> bool:
        parsed = parse_prompt_id(prompt_id) if isinstance(prompt_id, str) else None
        if parsed is None:
            return prompt_id in self._others
        epoch, row = parsed
        bitmap = self._rows.get(epoch, b"")
        return (row >> 3) < len(bitmap) and bool(bitmap[row >> 3] >> (row & 7) & 1)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        """Yield the ids by epoch and row, then those of another form."""
        for epoch in sorted(self._rows):
            for byte, bits in enumerate(self._rows[epoch]):
                yield from (f"e{epoch}-{byte * 8 + bit}" for bit in range(8) if bits >> bit & 1)
        yield from sorted(self._others)

    @property
    def epochs(self) -> list[int]:
        """The epochs of which a prompt is used, ascending."""
        return sorted(self._rows)

    def rows(self, epoch: int) -> NDArray[np.int64]:
        """Return the rows that are used in `epoch`, ascending."""
        return np.flatnonzero(np.unpackbits(np.frombuffer(self._rows[epoch], np.uint8), bitorder="little"))

    def to_json(self) -> dict[str, Any]:
        """Return the set as JSON values; `from_json` reads it back."""
        for epoch in self._rows.keys() - self._packed.keys():
            bitmap = bytes(self._rows[epoch]).rstrip(b"\0")
            self._packed[epoch] = base64.b64encode(zlib.compress(bitmap)).decode()
        epochs = {str(epoch): packed for epoch, packed in self._packed.items()}
        return {"count": self._count, "epochs": epochs, "others": sorted(self._others)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> UsedPrompts:
        """Return the set that `to_json` wrote.

        Raises:
            ValueError: the value is malformed, or its number of ids is not the one it states.
        """
        try:
            used, count = cls(value["others"]), int(value["count"])
            for epoch, packed in value["epochs"].items():
                bitmap = bytearray(zlib.decompress(base64.b64decode(packed)))
                used._rows[int(epoch)] = bitmap
                used._count += sum(byte.bit_count() for byte in bitmap)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, zlib.error) as error:
            raise ValueError(f"used prompts cannot be read; the file is damaged: {error!r:.200}") from error
        if used._count != count:
            raise ValueError(f"used prompts: {used._count} ids where count says {count}; the file is damaged")
        return used


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
                position, order = self._heap[0]
                turn = self.waiting(order)
                if turn is not None and self._position(turn.order, turn.attempt) == position:
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

    def _position(self, order: int, attempt: int) -> tuple[int, int]:
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
        heapq.heappush(self._heap, (self._position(turn.order, turn.attempt), turn.order))
