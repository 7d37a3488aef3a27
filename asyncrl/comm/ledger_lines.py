"""The lines of a run's ledger: what became of every rollout. `docs/ledger.md` describes the format and what it proves.

One JSON object per line, of these types, told apart by `kind`. Those of single rollouts come from the GserverManager
(admitted, finished, dropped, abandoned) and the MasterWorker (trained); the others are the MasterWorker's. All of
these but `manager` end with a `seal`, the SHA-256 of the seal before and of all that was written since, so that a line
that was changed, added or taken away shows. Times are seconds since 1970 of the process that says it.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import TypeAlias

import msgspec

SEAL_BYTES = 64
"""A seal is so many hexadecimal digits, and the last thing in its line but for `SEAL_END`."""
SEAL_END = b'"}\n'


class PromptGoes(StrEnum):
    """Effect of a drop on its prompt."""

    returned = auto()
    """It is tried again."""
    given_up = auto()
    """It is never tried again: the drop is for good."""
    used = auto()
    """Another rollout of it is trained, about to be, or was dropped for good."""


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of all lines."""


class Manager(_Line, frozen=True, tag="manager"):
    """The lines about rollouts that follow come from the GserverManager with this `number`, which counts them from 1.

    So a MasterWorker that takes over knows which of them the ledger has.
    """

    number: int
    at: float


class Admitted(_Line, frozen=True, tag="admitted", omit_defaults=True):
    """The staleness gate let `worker` start the rollout while `version` was served.

    `order` is the prompt's position in the data order; its epoch is in its id, `e<epoch>-<row>`. `failures`: how many
    of its tries raised before. `adopted`: another manager says so than the one that let it start, which died before.
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
    """The trainer has the rollout, which has `tokens` tokens. After a drop as `worker_died` it undoes the drop."""

    rollout: str
    tokens: int
    at: float


class Dropped(_Line, frozen=True, tag="dropped", omit_defaults=True):
    """The rollout will not be trained.

    Of a prompt that is returned: `attempt` and `failures` of its next try, that is, how many of its tries raised. No
    `attempt` in ledgers of earlier versions of asyncrl.
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


class Trained(_Line, frozen=True, tag="trained", omit_defaults=True):
    """The step that made version `step` trained the rollout, whatever was said of it before.

    `versions`: generated tokens by the policy version that produced them. `reward`: the mean over its `episodes`, which
    gave so many `samples`. `opponents`: oldest and newest version of each of `policies` that answered in it; 0 of a
    model that stays.
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


class LedgerBooks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gate's counters as of a line: all that the lines before it add up to."""

    submitted: int
    trained: int
    dropped: dict[str, int]
    abandoned: int
    running: int
    finished_untrained: int


class RunSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that the lines are to be judged by; `workers` is 0 where kept samples were trained."""

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
    """A launch begins at `version`, as lineage `lineage`.

    It goes on from line `after`, which is that of its checkpoint (0: from the beginning): what lies between `after` and
    this line is forgotten. `carried`: trained and dropped before, where the checkpoint tells of no line.
    """

    lineage: int
    version: int
    after: int
    settings: RunSettings
    carried: LedgerBooks | None
    seal: str


class Step(_Sealed, frozen=True, tag="step", kw_only=True):
    """Train step `step` is complete: its `trained` lines come before. No `books` where the gate could not be asked."""

    lineage: int
    step: int
    books: LedgerBooks | None
    seal: str


class Saved(_Sealed, frozen=True, tag="saved", kw_only=True):
    """A checkpoint of `version` is about to be written, which goes on from this line."""

    lineage: int
    version: int
    books: LedgerBooks | None
    seal: str


class End(_Sealed, frozen=True, tag="end", kw_only=True):
    """The launch ended by itself, with these books."""

    lineage: int
    version: int
    books: LedgerBooks
    seal: str


RolloutLine: TypeAlias = Admitted | Finished | Dropped | Abandoned
"""Lines about a rollout that the GserverManager writes."""
SealedLine: TypeAlias = Begin | Step | Saved | End
Line: TypeAlias = Manager | RolloutLine | Trained | SealedLine
