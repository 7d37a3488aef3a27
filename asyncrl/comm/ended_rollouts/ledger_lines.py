"""The lines of a run's ledger, which records the end of every rollout. `docs/ledger.md` describes the format and what
it proves.

Each line is one JSON object of one of these types, which `kind` identifies. All come from the GserverManager, whose
gate decides them. Lines about single rollouts are `admitted`, `finished`, `dropped`, `abandoned` and `trained`. The
others end with a `seal`: the SHA-256 of the previous seal and everything written since. So a changed, added or removed
line is detected. Times are seconds since 1970.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import TypeAlias

import msgspec

SEAL_BYTES = 64
"""Number of hexadecimal digits of a seal, which is last in its line, before `SEAL_END`."""
SEAL_END = b'"}\n'


class PromptGoes(StrEnum):
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
    prompt: PromptGoes
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
    `episodes`, which gave `samples` samples. `opponents` has the oldest and newest version of each of `policies` that
    answered in the rollout; 0 for a model that does not change. `policies` has the share of each trained policy, if
    there are several; `actor` is the run's own.
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
    opponents: dict[str, tuple[int, int]] = {}
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
    books: RolloutCounts
    seal: str


class End(_Sealed, frozen=True, tag="end", kw_only=True):
    """The launch ended normally, with these counters."""

    lineage: int
    version: int
    books: RolloutCounts
    seal: str


RolloutLine: TypeAlias = Admitted | Finished | Dropped | Abandoned | Trained
"""Lines about a rollout."""
SealedLine: TypeAlias = Begin | Step | End
Line: TypeAlias = RolloutLine | SealedLine
