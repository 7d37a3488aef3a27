"""Speed of a generation server, and the state of each running answer in it (`asyncrl.simulator.engine`)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

GROUPS_TOKEN = 1
"""Stands for all tokens that samples of a group have alike."""
ROUNDING = 1e-6
"""Tokens that a sequence may lack at its end, by rounding."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Speed of a server; see the module's docstring. `update_s`: from its pause to its new weights.

    `kv_tokens`: what its memory holds of context, in tokens.
    """

    step_s: float
    sequence_s: float
    context_s: float
    prefill_s: float
    prefill_token_s: float
    max_running: int
    kv_tokens: float
    update_s: float
    row_s: float = 0.0
    admission_s: float = 0.0
    call_s: float = 0.0
    change_share: int = 0
    """What queues starts, and what ended leaves its row, once that is one sequence in so many; 0: at once."""
    idle_steps: int = 0
    """With `change_share`: or so many steps after it was done last."""

    def decode_step_s(self, running: int, context: float, rows: int | None = None) -> float:
        """One token of each of `running` sequences with `context` tokens of context in all; `rows` None: as many."""
        rows = running if rows is None else rows
        return self.step_s + self.sequence_s * running + self.row_s * rows + self.context_s * context

    def coarse(self, grain: int) -> EngineModel:
        """The same server, in units of `grain` tokens: a unit of an answer takes `grain` steps."""
        return replace(
            self,
            step_s=self.step_s * grain,
            sequence_s=self.sequence_s * grain,
            row_s=self.row_s * grain,
            context_s=self.context_s * grain * grain,
            prefill_token_s=self.prefill_token_s * grain,
            kv_tokens=self.kv_tokens / grain,
        )

    def slower(self, factor: float) -> EngineModel:
        """All takes `factor` times as long."""
        times = [each.name for each in fields(self) if each.name.endswith("_s")]
        return replace(self, **{name: getattr(self, name) * factor for name in times})


@dataclass(slots=True)
class Running:
    """An answer under way. `done`: units generated, as of the last time it stopped running; `own_from`: units that are
    another's of its group, too; `began_at`: in the engine's count of steps while it runs; `own`: it runs in a row of
    its own; `marks`: (units, version) where the version changed."""

    rid: str
    input_ids: Sequence[int]
    token: int
    most: float
    own_from: float
    finish: str
    answer: asyncio.Future[Running]
    done: float = 0.0
    began_at: float = 0.0
    running: bool = False
    own: bool = False
    place: int = -1
    """Number of its entry in the heap, which holds those of earlier starts too."""
    aborted: bool = False
    marks: list[tuple[int, int]] = field(default_factory=list)

    @property
    def context(self) -> float:
        """Units of context when it begins to run."""
        return len(self.input_ids) + self.done

    @property
    def units(self) -> int:
        """Whole units generated."""
        return int(self.done + ROUNDING)

    @property
    def generated(self) -> list[int]:
        """Return the generated tokens: first the group's shared ones, then its own."""
        shared = min(self.units, int(self.own_from))
        return [GROUPS_TOKEN] * shared + [self.token] * (self.units - shared)


@dataclass(slots=True)
class EngineCounts:
    """Work of a server: seconds of decoding or prefilling, seconds paused, the integral of running sequences over time,
    and token counts."""

    busy_s: float = 0.0
    prefilling_s: float = 0.0
    paused_s: float = 0.0
    running_s: float = 0.0
    generated: float = 0.0
    prefilled: float = 0.0
    cached: float = 0.0
    interrupted: float = 0.0
    """Tokens of answers that a weight update ended, which have to be prefilled again."""
    retracted: int = 0
    updates: int = 0

    def add(self, other: EngineCounts) -> None:
        """Sum of two."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class PrefixCache:
    """Prefixes whose keys and values are there: of at most `capacity` units, those used last."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._cached: OrderedDict[int, None] = OrderedDict()

    def clear(self) -> None:
        """With new weights."""
        self._cached.clear()

    def found(self, ids: Iterable[int]) -> int:
        """Units of `ids` from the beginning on that are cached; from here on all of them are."""
        key = found = 0
        missed = False
        for token in ids:
            key = hash((key, token))
            if not missed and key in self._cached:
                found += 1
                self._cached.move_to_end(key)
                continue
            missed = True
            self._cached[key] = None
        while len(self._cached) > self._capacity:
            self._cached.popitem(last=False)
        return found
