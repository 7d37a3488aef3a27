"""Which prompt comes when: the data order of a run, cut into shards, each prompt of an epoch exactly once.

Mechanism. An epoch is a permutation of the dataset's rows that depends on (seed, epoch) alone. Laid end to end, the
epochs give every prompt a global position, its *order* = epoch · num_rows + position in the epoch, and a name,
`e<epoch>-<row>`. Shard i of N owns the orders with `order % N == i`. So the shards partition each epoch whatever N is,
and the training batch of step v, orders [v·B, (v+1)·B), does not depend on N.

Life of a prompt: `next()` hands it out; then either it is *used* (trained, or dropped for good), or `give_back` returns
it and it is handed out again before any later one. Only where it is to be tried as another *attempt*, with other random
numbers, it is handed out after the rest of the epoch: under the same weights it would have come to nothing again. A
prompt that was out when the run died is in no one's `used`: the restarted stream, with the same or another N, hands it
out again. Ids in `used` are skipped, so nothing is trained twice. Where only the stream's own process died, some of
what it handed out lives on elsewhere, in the trainer's hands for one: that is `out` of its successor from the
beginning, which hands it out only if it is given back.

Example, 3 rows, 2 shards, epochs (2 0 1) and (0 1 2): shard 0 yields e0-2, e0-1, e1-1, ... (orders 0, 2, 4), shard 1
yields e0-0, e1-0, e1-2, ... (orders 1, 3, 5).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from asyncrl.api.seeds import seed_from as seed_from  # known by this name too
from asyncrl.plugins.datasets.used_prompts import UsedPrompts

ATTEMPTS_KEPT = 65_536
"""Prompts whose later attempts are remembered while they are out. One forgotten comes back before any later prompt."""
CACHED_EPOCHS = 4
"""Permutations kept: a stream works in one epoch; prompts given back come from the one before, as a rule."""


def epoch_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The permutation of `num_rows` rows in which epoch `epoch` visits them; shape `[num_rows]`."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def prompt_seed(run_seed: int, order: int, attempt: int = 0) -> int:
    """Base sampling seed of an attempt at the prompt at `order`; sample i of its group derives its own from it."""
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


class DataOrder:
    """Which prompt is where in the order, of a dataset of `num_rows` rows (at least 1) under `seed`."""

    def __init__(self, num_rows: int, seed: int) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows is {num_rows}: the dataset needs at least one row")
        self.num_rows, self.seed = num_rows, seed
        self._permutations: dict[int, NDArray[np.int64]] = {}
        self._positions: dict[int, NDArray[np.int64]] = {}

    def ref(self, order: int) -> PromptRef:
        """The prompt at `order`, as its first attempt."""
        epoch, position = divmod(order, self.num_rows)
        row = int(self._permutation(epoch)[position])
        return PromptRef(f"e{epoch}-{row}", order, row)

    def order_of(self, prompt_id: str) -> int:
        """The order of `prompt_id`.

        Raises:
            ValueError: it names no prompt of this dataset.
        """
        epoch_text, separator, row_text = prompt_id[1:].partition("-")
        well_formed = prompt_id[:1] == "e" and separator and epoch_text.isdecimal() and row_text.isdecimal()
        if not well_formed or int(row_text) >= self.num_rows:
            raise ValueError(f"prompt id {prompt_id!r} names no prompt of {self.num_rows} rows: ids are e<epoch>-<row>")
        epoch = int(epoch_text)
        self._permutation(epoch)
        return epoch * self.num_rows + int(self._positions[epoch][int(row_text)])

    def orders_of(self, used: UsedPrompts) -> NDArray[np.int64]:
        """The orders of `used` prompts, ascending."""
        found = [np.empty(0, np.int64)]
        for epoch in used.epochs:
            rows = np.zeros(self.num_rows, bool)
            rows[used.rows(epoch)] = True
            found.append(np.flatnonzero(rows[self._permutation(epoch)]) + epoch * self.num_rows)
        return np.concatenate(found)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            permutation = epoch_order(self.num_rows, self.seed, epoch)
            positions = np.empty_like(permutation)
            positions[permutation] = np.arange(self.num_rows)
            while len(self._permutations) >= CACHED_EPOCHS:
                oldest = min(self._permutations)
                del self._permutations[oldest], self._positions[oldest]
            self._permutations[epoch], self._positions[epoch] = permutation, positions
        return self._permutations[epoch]


class LentPrompts:
    """The prompts that a worker without a shard was lent and has not begun, the earliest first.

    Args:
        num_rows: rows of the dataset, at least 1.
        seed: seed of the order.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        self._order = DataOrder(num_rows, seed)
        self._here: dict[int, int] = {}  # by order the attempt
        self._orders: list[int] = []

    def next(self) -> PromptRef | None:
        """The earliest prompt; None where none is here."""
        if not self._orders:
            return None
        order = heapq.heappop(self._orders)
        return replace(self._order.ref(order), attempt=self._here.pop(order))

    def give_back(self, prompt_id: str, attempt: int = 0) -> None:
        """The prompt is lent, or comes back to be tried once more.

        Raises:
            ValueError: it is here already, or names no prompt of this dataset.
        """
        order = self._order.order_of(prompt_id)
        if order in self._here:
            raise ValueError(f"prompt {prompt_id!r} is here already")
        self._here[order] = attempt
        heapq.heappush(self._orders, order)


class PromptStream(DataOrder):
    """Endless, in order: the prompts of shard `shard_index` of `num_shards`, over epochs.

    Args:
        num_rows: rows of the dataset, at least 1.
        seed: seed of the order.
        shard_index: this shard, 0 to `num_shards` - 1.
        num_shards: number of shards.
        used: prompt ids never to hand out.
        out: prompts of this shard that a stream before this one handed out, with their attempts.

    Raises:
        ValueError: an argument is out of range, or a used id names no prompt of this dataset.
    """

    def __init__(
        self,
        num_rows: int,
        seed: int,
        shard_index: int = 0,
        num_shards: int = 1,
        used: Iterable[str] = (),
        out: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(num_rows, seed)
        if not 0 <= shard_index < num_shards:
            raise ValueError(f"shard_index is {shard_index} of {num_shards} shards: give 0 to {num_shards - 1}")
        self.shard_index, self.num_shards = shard_index, num_shards
        self._next_order = shard_index
        self._given_back: list[tuple[int, int]] = []  # order and attempt
        self._put_off: list[tuple[int, int, int]] = []  # the order before which it is due, order and attempt
        self._waiting: set[int] = set()  # orders in the two lists above
        self._settled = UsedPrompts()  # at the beginning; what is settled later is past `next`
        for prompt_id in used:
            self.order_of(prompt_id)
            self._settled.add(prompt_id)
        unsettled = ((key, attempt) for key, attempt in (out or {}).items() if key not in self._settled)
        before = {self.order_of(prompt_id): attempt for prompt_id, attempt in unsettled}
        self._out_ahead = set(before)  # out, though `next` is not there yet
        # Of orders that are out as a later attempt than the first.
        self._attempts: OrderedDict[int, int] = OrderedDict()
        for order, attempt in before.items():
            self._note_attempt(order, attempt)

    def next(self) -> PromptRef:
        """The next prompt: the earliest that was given back, else the next of the shard that is not used; between two
        epochs those that were put off.
        """
        if self._given_back:
            return self._hand_out(*heapq.heappop(self._given_back))
        while self._is_settled(self._next_order) or self._next_order in self._out_ahead:
            self._out_ahead.discard(self._next_order)
            self._next_order += self.num_shards
        if self._put_off and self._put_off[0][0] <= self._next_order:
            return self._hand_out(*heapq.heappop(self._put_off)[1:])
        order = self._next_order
        self._next_order += self.num_shards
        return self._hand_out(order, 0)

    def give_back(self, prompt_id: str, attempt: int = 0) -> None:
        """Hand `prompt_id` out again: before any later prompt, or as a later `attempt` than it was out as, after the
        rest of the epoch.

        Raises:
            ValueError: the prompt is not out: it was never handed out, or is given back already.
        """
        order = self.order_of(prompt_id)
        if not self._is_out(order):
            raise ValueError(f"prompt {prompt_id!r} is not out of this shard: give back what `next` handed out, once")
        self._waiting.add(order)
        if attempt <= self._attempts.pop(order, 0):
            heapq.heappush(self._given_back, (order, attempt))
        else:
            epoch = self._next_order // self.num_rows
            heapq.heappush(self._put_off, ((epoch + 1) * self.num_rows, order, attempt))

    def _is_out(self, order: int) -> bool:
        """Whether the prompt was handed out, is not settled as far as this stream knows, and did not come back."""
        if order % self.num_shards != self.shard_index or order in self._waiting or self._is_settled(order):
            return False
        return order < self._next_order or order in self._out_ahead

    def _is_settled(self, order: int) -> bool:
        return self.ref(order).prompt_id in self._settled

    def _hand_out(self, order: int, attempt: int) -> PromptRef:
        self._waiting.discard(order)
        self._note_attempt(order, attempt)
        return replace(self.ref(order), attempt=attempt)

    def _note_attempt(self, order: int, attempt: int) -> None:
        if attempt:
            self._attempts[order] = attempt
            if len(self._attempts) > ATTEMPTS_KEPT:
                self._attempts.popitem(last=False)
