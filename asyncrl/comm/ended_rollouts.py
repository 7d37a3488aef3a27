"""How rollouts ended: the reasons for which they are dropped, the lines of the run's ledger, and recent ids.

The ledger records the end of every rollout; `docs/ledger.md` describes the format and what it proves. Each line is one
JSON object of one of the types below, which `kind` identifies. All come from the GserverManager, whose gate decides
them. Lines about single rollouts are `admitted`, `finished`, `dropped`, `abandoned` and `trained`. The others end with
a `seal`: the SHA-256 of the previous seal and everything written since. So a changed, added or removed line is
detected. Times are seconds since 1970.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from enum import StrEnum, auto
from typing import Generic, Self, TypeAlias, TypeVar

import msgspec

_DEFECT = "0. Anything else names a defect: see the `rollout_worker` logs."
DROPPED = "rollout/dropped_"
"""Prefix of the metrics that count the rollouts dropped since the step before. The reason follows it."""


class DropReason(StrEnum):
    """The system's own reasons for which rollouts leave the count without being trained; those of filters
    (`FilterDecision.reason`) have a name space of theirs (`filtered`). Also the reason of an evaluation that has no
    result although nothing failed.

    Attributes:
        meaning: continues "Rollouts dropped since the step before, ...".
        healthy: the number of them in a run that is well.
        failure: continues "12 rollouts failed ..." if someone has to look into the reason; else None.
    """

    meaning: str
    healthy: str
    failure: str | None

    def __new__(cls, value: str, meaning: str, healthy: str, failure: str | None = None) -> Self:
        """Return the member, which is `value`."""
        member = str.__new__(cls, value)
        member._value_, member.meaning, member.healthy, member.failure = value, meaning, healthy, failure
        return member

    stale = (
        "stale",
        "as their oldest token is older than `max_head_offpolicyness` allows; their prompts are tried again",
        "0 or few. Each is generation thrown away.",
    )
    failed = (
        "failed",
        "as they failed at an unknown place",
        _DEFECT,
        "in the agent, the environment, the dataset or a server",
    )
    """If the place is known, `failed_in` names it."""
    invalid_prompt = (
        "invalid_prompt",
        "as their row gives no prompt: it is empty, or the chat template refuses it",
        "0.",
        "as their rows make no prompt",
    )
    overlong_prompt = (
        "overlong_prompt",
        "as their prompt is longer than `dataset.max_prompt_tokens`",
        "Few. They were counted at the start of the run.",
    )
    timeout = (
        "timeout",
        "as they took longer than `rollout.rollout_timeout_s`",
        "0.",
        "beyond rollout.rollout_timeout_s",
    )
    agent_rejected = "agent_rejected", "as their agent returned no samples", "0, unless your agent rejects prompts."
    session_silent = (
        "session_silent",
        "as too few of their online sessions got a reward before their clients fell silent",
        "Few. Each is a client that came and went.",
    )
    session_over_age = (
        "session_over_age",
        "as their online sessions kept a step waiting for `hold_s`",
        "Few. More mean that sessions last longer than `max_head_offpolicyness` versions.",
    )
    client_left = (
        "client_left",
        "as the client that had asked for their online session was gone",
        "Few.",
    )
    curriculum = (
        "curriculum",
        "as their prompt was too easy or too hard and is left out of this epoch",
        "Set by `dataset.curriculum`.",
    )
    worker_died = "worker_died", "as their RolloutWorker is gone", "0. Their prompts are tried again."
    crashed_worker = (
        "crashed_worker",
        "as their RolloutWorkers died three times while they ran the prompt, which is not tried again",
        "0.",
        "as their prompts end the RolloutWorker that plays them",
    )


CUT_SHORT = "cut short by the end of the run"
"""The reason of an evaluation that had not ended when the run was stopped."""


def failure(reason: str) -> str | None:
    """Return the message about rollouts dropped for `reason`; None if nobody has to look into the reason."""
    own, _, label = reason.partition(": ")
    if label:
        return f"in {label}" if own == DropReason.failed else None
    return next((each.failure for each in DropReason if each == own), None)


_FILTER = "filter: "


def filtered(reason: str, *, exhausted: bool = False) -> str:
    """Return the drop reason of a group that a filter rejected for `reason`: `filter: zero_variance`; `exhausted`: its
    prompt may not be returned again.
    """
    return f"{_FILTER}{reason}_exhausted" if exhausted else _FILTER + reason


def failed_in(label: str | None) -> str:
    """Return the drop reason of a failed rollout; it names the user's code, if known: `failed: reward my.py:score`."""
    return DropReason.failed if label is None else f"{DropReason.failed}: {label}"


def is_filter_reason(reason: str) -> bool:
    """True if `reason` comes from a filter."""
    return reason.startswith(_FILTER)


LOST_EPISODES = "rollout/lost_episodes: "
"""Prefix of the metrics that count episodes dropped while the rest of their groups continued. The text after it names
what failed and how: `rollout/lost_episodes: env my.py:Game.step raised ValueError`.
"""


def lost_episodes(metrics: Mapping[str, float]) -> Counter[str]:
    """Return the number of lost episodes in `metrics`, by what failed."""
    begins = LOST_EPISODES
    lost = {name.removeprefix(begins): int(value) for name, value in metrics.items() if name.startswith(begins)}
    return Counter(lost)


SEAL_BYTES = 64
"""Number of hexadecimal digits of a seal, which is last in its line, before `SEAL_END`."""
SEAL_END = b'"}\n'


class PromptFate(StrEnum):
    """Effect of a drop on its prompt."""

    returned = auto()
    """It is tried again."""
    given_up = auto()
    """It is never tried again: the drop is for good."""


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of all lines."""


class Admitted(_Line, frozen=True, tag="admitted", omit_defaults=True):
    """The staleness gate let `worker` start the rollout while `version` was served.

    `order` is the prompt's position in the data order; its epoch is in its id, `e<epoch>-<row>`. `failures` counts the
    prompt's earlier tries that raised. `adopted` is true if an earlier lineage admitted it, and a RolloutWorker or a
    training rank had it when this one began.
    """

    rollout: str
    prompt: str
    order: int
    attempt: int
    worker: str
    version: int
    at: float
    failures: int = 0
    adopted: bool = False


class Finished(_Line, frozen=True, tag="finished"):
    """The trainer has the rollout, which has `tokens` tokens."""

    rollout: str
    tokens: int
    at: float


class Dropped(_Line, frozen=True, tag="dropped", omit_defaults=True):
    """The rollout will not be trained.

    If its prompt is returned, `attempt` and `failures` are those of the next try (`failures` counts the tries that
    raised).
    """

    rollout: str
    reason: str
    prompt: PromptFate
    at: float
    attempt: int | None = None
    failures: int = 0


class Abandoned(_Line, frozen=True, tag="abandoned"):
    """The run ended before the rollout did."""

    rollout: str
    at: float


class PolicyTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Share of a trained policy in a rollout: tokens that its servers generated for the rollout, and the tokens and the
    number of the samples that train it. Samples that the agent did not return are only in the first.
    """

    generated: int
    trained: int
    samples: int


class Trained(_Line, frozen=True, tag="trained", omit_defaults=True):
    """The step that produced version `step` trained the rollout.

    `versions` counts the generated tokens by the policy version that produced them. `reward` is the mean over its
    `episodes`, which gave `samples` samples. `policy_servers` has the oldest and newest version of each of `policies`
    that answered in the rollout; 0 for a model that does not change. `policies` has the share of each trained policy,
    if there are several; `actor` is the run's own.
    """

    rollout: str
    prompt: str
    order: int
    lineage: int
    step: int
    versions: dict[int, int]
    episodes: int
    samples: int
    reward: float
    policy_servers: dict[str, tuple[int, int]] = msgspec.field(name="opponents", default_factory=dict)
    policies: dict[str, PolicyTokens] = {}


class RolloutCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gate's counters: `submitted = trained + dropped + abandoned + running + finished_untrained`, always."""

    submitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    abandoned: int = 0
    running: int = 0
    finished_untrained: int = 0

    @property
    def balanced(self) -> bool:
        """True if every submitted rollout is accounted for."""
        left = self.trained + sum(self.dropped.values()) + self.abandoned
        return self.submitted == left + self.running + self.finished_untrained


class RunSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that the audit of the lines needs. `workers` is 0 in a run that trains kept samples."""

    train_batch_size: int
    max_head_offpolicyness: int
    on_stale: str
    workers: int
    seed: int
    shuffle: bool = True


class _Sealed(_Line, frozen=True, kw_only=True):
    """Base of lines that end with a `seal`; `line` is their number, from 1 over all files."""

    line: int
    at: float


class Begin(_Sealed, frozen=True, tag="begin", kw_only=True):
    """The run begins, or continues from a checkpoint at `version`, as lineage `lineage`: at a launch, and after a death
    of MasterWorker, GserverManager or a ModelWorker.

    It continues after line `after`, the line of its checkpoint (0: from the beginning). Lines between `after` and this
    one no longer count. `carried` has the counters up to the checkpoint, if the ledger does not reach to it.
    """

    lineage: int
    version: int
    after: int
    settings: RunSettings
    carried: RolloutCounts | None
    seal: str


class Step(_Sealed, frozen=True, tag="step", kw_only=True):
    """Train step `step` is complete; its `trained` lines precede this one. A run that continues from the state of the
    step, in memory or on disk, continues after this line.
    """

    lineage: int
    step: int
    counts: RolloutCounts = msgspec.field(name="books")
    seal: str


class End(_Sealed, frozen=True, tag="end", kw_only=True):
    """The launch ended normally, with these counters."""

    lineage: int
    version: int
    counts: RolloutCounts = msgspec.field(name="books")
    seal: str


RolloutLine: TypeAlias = Admitted | Finished | Dropped | Abandoned | Trained
"""Lines about a rollout."""
SealedLine: TypeAlias = Begin | Step | End
Line: TypeAlias = RolloutLine | SealedLine


V = TypeVar("V", bound=object)
AT_LEAST = 65_536
"""Least number of ids: half a minute at 2,000 rollouts per second, about 10 MB. No client repeats a call for longer."""
LIVE_MULTIPLE = 4
GENERATIONS = 8
"""Number of generations: at most one part in `GENERATIONS` is remembered longer than necessary; more generations make a
lookup slower.
"""


def ids_remembered(batch_size: int, max_staleness: int) -> int:
    """Return the number of ids to remember if `(max_staleness + 1) * batch_size` rollouts may be live.

    If the workers are cut off, all of these may leave the count at once and come back, and so may the rollouts that
    took their places. So the number of remembered ids is several times the number of live rollouts.

    No set of open rollouts can replace the bound: a worker that was paused may ask for any of its rollouts, however
    late. If its id was forgotten, the gate admits it as a new one. The counters still balance, and no prompt is trained
    twice. The audit then reports that the rollout was admitted before.
    """
    return max(AT_LEAST, LIVE_MULTIPLE * (max_staleness + 1) * batch_size)


class RecentIds(Generic[V]):
    """The `at_least` most recent ids, each with a value, so that a late or repeated message about an ended rollout is
    recognized.

    A dict that is filled at one end and emptied at the other takes more memory than its entries need. Deleted entries
    keep their places until it is full. Then it is rebuilt with room for three times its entries. So the ids are kept in
    generations, each a dict that is only filled. A new generation begins when the newest is full, and the oldest is
    dropped as a whole once the others hold enough ids. The memory used thus varies by one generation.

    Measured with 65,536 ids: 8 MiB, while an `OrderedDict` takes 15; a plain dict emptied at its front takes 20 times
    as long for each id.

        at least 16:   oo oo oo oo oo oo oo oo o      the newest (right) is being filled; then the oldest goes

    Args:
        at_least: number of ids (`ids_remembered`); up to about an eighth more are remembered.
    """

    def __init__(self, at_least: int) -> None:
        self._at_least = at_least
        self._each = -(-at_least // GENERATIONS)
        self._newest: dict[str, V] = {}
        self._generations: deque[dict[str, V]] = deque([self._newest])  # the newest first

    def clear(self) -> None:
        """Forget all ids."""
        self._newest = {}
        self._generations = deque([self._newest])

    def __len__(self) -> int:
        return sum(map(len, self._generations))

    def __contains__(self, key: str) -> bool:
        return any(key in generation for generation in self._generations)

    def get(self, key: str) -> V | None:
        """Return the value of `key`; None if it is not remembered."""
        for generation in self._generations:
            if key in generation:
                return generation[key]
        return None

    def put(self, key: str, value: V) -> None:
        """Remember `key` as the newest, with this value."""
        self.pop(key)
        self._newest[key] = value
        if len(self._newest) >= self._each:
            self._begin_another()

    def pop(self, key: str) -> V | None:
        """Forget `key` and return its value; None if it was not remembered."""
        for generation in self._generations:
            if key in generation:
                return generation.pop(key)
        return None

    def _begin_another(self) -> None:
        """Begin a new generation, as the newest is full.

        Neighbours with few ids left are merged, to bound their number.
        """
        kept: deque[dict[str, V]] = deque()
        for generation in reversed(self._generations):
            if kept and len(kept[0]) + len(generation) <= self._each:
                kept[0].update(generation)
            else:
                kept.appendleft(generation)
        self._newest, self._generations = {}, kept
        while len(self) - len(kept[-1]) >= self._at_least:  # several generations if each has few ids left
            kept.pop()
        kept.appendleft(self._newest)
