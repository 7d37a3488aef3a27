"""Speed of a generation server, and the state of each running answer in it (`continuous_batch`)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

GROUPS_TOKEN = 1
"""The token used wherever samples of a group have equal tokens."""
ROUNDING = 1e-6
"""Part of a token that a sequence may lack at its end because of rounding."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Speed of a server, with the terms of `continuous_batch`. `update_s`: time from its pause to its new weights.

    `kv_tokens`: number of tokens of context that fit its memory.
    """

    step_s: float
    sequence_s: float
    context_s: float
    prefill_s: float
    prefill_token_s: float
    max_running: int
    kv_tokens: float
    update_s: float
    switch_s: float = 0.0
    """Seconds that a device shared with the trainer takes to change its user, in each direction."""
    row_s: float = 0.0
    admission_s: float = 0.0
    call_s: float = 0.0
    change_share: int = 0
    """Queued sequences start, and ended ones leave their rows, once they are one sequence in this number; 0: at once.
    """
    idle_steps: int = 0
    """With `change_share`: number of steps since the last such change after which this happens in any case."""

    def decode_step_s(self, running: int, context: float, rows: int | None = None) -> float:
        """Return the time for one token of each of `running` sequences with `context` tokens in total; by default
        `rows` is `running`.
        """
        rows = running if rows is None else rows
        return self.step_s + self.sequence_s * running + self.row_s * rows + self.context_s * context

    def coarse(self, grain: int) -> EngineModel:
        """Return the same server in units of `grain` tokens: a unit of an answer takes `grain` steps."""
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
        """Return a server that takes `factor` times as long for everything."""
        times = [each.name for each in fields(self) if each.name.endswith("_s")]
        return replace(self, **{name: getattr(self, name) * factor for name in times})


@dataclass(slots=True)
class Running:
    """A running answer.

    Attributes:
        done: units generated when it last stopped running.
        own_from: units that it shares with another answer of its group.
        began_at: while it runs, its start in the engine's count of steps.
        own: it runs in its own row.
        marks: (units, version) at each change of the version.
    """

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
    """Number of its entry in the heap, which also holds entries of earlier starts."""
    aborted: bool = False
    marks: list[tuple[int, int]] = field(default_factory=list)

    @property
    def context(self) -> float:
        """Return the units of context when it begins to run."""
        return len(self.input_ids) + self.done

    @property
    def units(self) -> int:
        """Return the number of whole units generated."""
        return int(self.done + ROUNDING)

    @property
    def generated(self) -> list[int]:
        """Return the generated tokens: first the group's shared ones, then its own."""
        shared = min(self.units, int(self.own_from))
        return [GROUPS_TOKEN] * shared + [self.token] * (self.units - shared)


@dataclass(slots=True)
class EngineCounts:
    """Work of a server: seconds of decoding or prefilling, seconds paused, the integral of running sequences over time,
    and token counts.
    """

    busy_s: float = 0.0
    prefilling_s: float = 0.0
    paused_s: float = 0.0
    running_s: float = 0.0
    generated: float = 0.0
    prefilled: float = 0.0
    cached: float = 0.0
    interrupted: float = 0.0
    """Tokens of answers that a weight update interrupted, which must be prefilled again."""
    retracted: int = 0
    updates: int = 0

    def since(self, earlier: EngineCounts) -> EngineCounts:
        """Return the work since `earlier` counts of the same servers."""
        return EngineCounts(*(getattr(self, name) - getattr(earlier, name) for name in self.__slots__))

    def add(self, other: EngineCounts) -> None:
        """Add `other` to these counts."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class PrefixCache:
    """The prefixes whose keys and values are cached: the most recently used, up to `capacity` units."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._cached: OrderedDict[int, None] = OrderedDict()

    def clear(self) -> None:
        """Empty the cache, since the weights are new."""
        self._cached.clear()

    def found(self, ids: Iterable[int]) -> int:
        """Return the number of first units of `ids` that are cached; then cache all units."""
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
