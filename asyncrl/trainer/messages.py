"""The calls that a ModelWorker serves, with their replies. The MasterWorker makes all but `SendWeights`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from asyncrl.api.trajectory import policy_of
from asyncrl.comm.request_reply import Done, Reply, Request
from asyncrl.master.graph import Call
from asyncrl.weights.manifest import FileEntry


class RolloutRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata of one received rollout of S samples: ids, lengths, versions and rewards, never a token.

    Attributes:
        head: data index of the ModelWorker that holds the tensors.
        oldest_version: policy version of the oldest generated token of the group; -1 if nothing was generated.
        version_tokens: generated tokens by policy version.
        lengths: `[S]` tokens of each sample, prompt included; `generated`, `rewards` and `truncated` also have S
            entries.
        rewards: rewards of the samples, with the rewards of their turns.
        episodes: `[S]` the member of the group that each sample belongs to; see `asyncrl.api.Sample.episode`.
        metrics: the rollout's own numbers by name: times, rewards.
        groups: `[S]` the comparison group of each sample; empty if none is named.
        distinct: number of tokens if a prefix that samples share counts once; 0 if prefixes are not shared.
        received_at: time at which this process of the rank received the rollout, in seconds since 1970; 0 if unknown.
    """

    rollout_id: str
    prompt_id: str
    order: int
    head: int
    oldest_version: int
    version_tokens: dict[int, int]
    lengths: tuple[int, ...]
    generated: tuple[int, ...]
    rewards: tuple[float, ...]
    truncated: tuple[bool, ...]
    episodes: tuple[int, ...]
    metrics: dict[str, float] = {}  # msgspec makes a new one for each record
    distinct: int = 0
    received_at: float = 0.0
    groups: tuple[str, ...] = ()

    @property
    def has_signal(self) -> bool:
        """True if the rewards of samples that are compared differ: those of one comparison group."""
        if not self.groups:
            return self.rewards.count(self.rewards[0]) < len(self.rewards)
        return len({*zip(self.groups, self.rewards, strict=True)}) > len({*self.groups})

    def has_signal_of(self, policy: str, others: Collection[str]) -> bool:
        """As `has_signal`, for the samples of one policy; `others` are trained beside the run's own policy, ""."""
        if not others or not self.groups:
            return self.has_signal and not policy
        own = [each for each in zip(self.groups, self.rewards, strict=True) if policy_of(each[0], others) == policy]
        return len({*own}) > len({group for group, _ in own})

    @property
    def tokens(self) -> int:
        """Tokens of all samples, prompts included."""
        return sum(self.lengths)

    @property
    def computed_tokens(self) -> int:
        """Tokens that a rank computes to train the rollout."""
        return self.distinct or self.tokens

    @property
    def generated_tokens(self) -> int:
        """Tokens that the policy generated."""
        return sum(self.generated)

    @property
    def episode_rewards(self) -> tuple[float, ...]:
        """The reward of each episode: the mean of its samples', which are mostly equal."""
        by_episode: dict[int, list[float]] = {}
        for episode, reward in zip(self.episodes, self.rewards, strict=True):
            by_episode.setdefault(episode, []).append(reward)
        return tuple(sum(rewards) / len(rewards) for rewards in by_episode.values())

    @property
    def newest_version(self) -> int:
        """Policy version of the newest generated token; -1 if nothing was generated."""
        return max(self.version_tokens, default=-1)


class PolledBuffer(Reply, frozen=True):
    """Every rollout received after the poll's cursor; `cursor` acknowledges them in the next poll."""

    cursor: int
    rollouts: tuple[RolloutRecord, ...]


class PollBuffer(Request[PolledBuffer], frozen=True):
    """Request the rollouts that were received after `cursor`.

    The rank answers once it has `at_least` rollouts, or `gather_s` seconds after the first; without any rollout it
    answers after `timeout_s`.
    """

    cursor: int
    timeout_s: float
    at_least: int = 1
    gather_s: float = 0.0


class Discard(Request[Done], frozen=True):
    """Forget these rollouts; unknown ids are ignored."""

    rollout_ids: tuple[str, ...]


class SendWeights(Request[Done], frozen=True):
    """Bring the paused server with index `server` at `url` to `version`, which is held in memory.

    `keep_cache`: the server keeps its KV cache. `timeout_s`: limit of one piece. Made by the GserverManager.
    """

    server: int
    url: str
    version: int
    keep_cache: bool
    timeout_s: float


class RankPulse(Reply, frozen=True):
    """A rank's signs of life.

    Attributes:
        pieces: micro-batches that the rank has begun, and pieces of data that it has read or written, so far.
        cpu_s: CPU time of its process so far, in seconds.
    """

    pieces: int = 0
    cpu_s: float = 0.0


class AskPulse(Request[RankPulse], frozen=True):
    """Ask for signs of life. Answered at once, even while the rank computes."""


class GridShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a step's batch that one copy of a grid gets, in data order; the same for all ranks of the copy.

    Attributes:
        minibatches: of each rollout, its optimizer step in each pass over the batch; then those of each further policy.
        sources: the worker that received each rollout.
        heads: for each grid of the placement, in its order, the worker that heads the copy which gets each rollout.
    """

    rollout_ids: tuple[str, ...]
    minibatches: tuple[tuple[int, ...], ...]
    sources: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]

    def keeping(self, rollout_ids: Collection[str]) -> GridShare:
        """Return the part of these rollouts, in the same order."""
        rows = [row for row, rollout_id in enumerate(self.rollout_ids) if rollout_id in rollout_ids]
        return GridShare(
            tuple(self.rollout_ids[row] for row in rows),
            tuple(self.minibatches[row] for row in rows),
            tuple(self.sources[row] for row in rows),
            tuple(tuple(of_grid[row] for row in rows) for of_grid in self.heads),
        )


class BeginStep(Request[Done], frozen=True):
    """Exchange and pack the rollouts of the step at `version`; each rank gets its own part.

    Attributes:
        min_version: only tokens of this version or newer carry loss.
        leaving: rollouts that this rank received, in data order.
        targets: for each grid of the placement, in its order, the worker that each of `leaving` goes to.
        num_minibatches: optimizer steps of all passes.
        shares: for each grid, the part of this worker's copy; None if the worker is not in the grid.
    """

    version: int
    min_version: int
    num_minibatches: int
    leaving: tuple[str, ...]
    targets: tuple[tuple[int, ...], ...]
    shares: tuple[GridShare | None, ...]


class CallStats(Reply, frozen=True):
    """Numbers by name, reduced over all ranks; some are lists with one number per minibatch."""

    stats: dict[str, Any]


class RunCall(Request[CallStats], frozen=True):
    """Run one call of the graph on the step's batch; the fields are those of `asyncrl.master.graph.Call`."""

    name: str
    role: str
    function: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    args: dict[str, Any]
    policy: str = ""

    @classmethod
    def of(cls, call: Call) -> RunCall:
        """Return the request to run `call`."""
        return cls(call.name, call.role, call.function, call.reads, call.writes, dict(call.args), call.policy)


class ScoreAhead(Request[Done], frozen=True):
    """Run `calls` on received rollouts before their step, and keep what they write with the rollouts.

    All ranks of the actor get the same request. `rollout_ids`: by data index, the rollouts of that head, which skips
    those that it no longer holds. `version`: version of the actor.
    """

    version: int
    rollout_ids: tuple[tuple[str, ...], ...]
    calls: tuple[RunCall, ...]


class MoveColumns(Request[Done], frozen=True):
    """Copy the columns `keys`, written by calls of the role `source`, to the ranks of the role `target` in another
    grid.

    All ranks of both grids get the same request. `policy`: policy of the columns' samples; empty: the run's own.
    """

    keys: tuple[str, ...]
    source: str
    target: str
    policy: str = ""


class EndedStep(Reply, frozen=True):
    """The rank's use of its device.

    Attributes:
        memory_bytes: peak so far: of its GPU, or resident memory without one.
        flops_per_s: floating point operations per second in the calls of the step; None if its models are not counted.
        mfu: `flops_per_s` as a share of the device's peak.
    """

    memory_bytes: int
    flops_per_s: float | None = None
    mfu: float | None = None


class EndStep(Request[EndedStep], frozen=True):
    """Free the step's batch."""


class PublishedWeights(Reply, frozen=True):
    """Folder of the version, with its weights if it was published to disk, else with the files that announce it."""

    path: str


class Publish(Request[PublishedWeights], frozen=True):
    """Make the weights of `role` available as `version`, in a folder if `to_disk`."""

    role: str
    version: int
    to_disk: bool


class CollectWeights(Request[Done], frozen=True):
    """Remove the published versions of `role` but those in `keep`."""

    role: str
    keep: tuple[int, ...]


class SaveCheckpoint(Request[Done], frozen=True):
    """Copy what a checkpoint of `version` needs to host memory and begin to write it for `path`.

    It is complete once every rank has answered `FinishShare` and the publisher `CommitCheckpoint`.

    `in_memory`, here and in the requests below: this is the in-memory checkpoint, from which restarted processes resume
    (`asyncrl.runtime.trials.memory_checkpoint`). A checkpoint on disk may be in progress at the same time. `path` is
    relative to the folder that each rank knows.
    """

    path: str
    version: int
    master_state: dict[str, Any]
    in_memory: bool = False


class WrittenShare(Reply, frozen=True):
    """The files that this rank has written, by name."""

    files: dict[str, FileEntry]


class FinishShare(Request[WrittenShare], frozen=True):
    """Wait until this rank's files of the checkpoint `path` are on the disk, or could not be written."""

    path: str
    in_memory: bool = False


class CommitCheckpoint(Request[Done], frozen=True):
    """Make the checkpoint `path`, which consists of the `files` of all ranks, visible.

    Sent to the publisher alone; the in-memory checkpoint, which is on every host, is committed by all ranks. Then older
    checkpoints beside it are deleted, except the newest `keep` and the versions `protected`.
    """

    path: str
    files: dict[str, FileEntry]
    keep: int
    protected: tuple[int, ...] = ()
    in_memory: bool = False


class LoadedCheckpoint(Reply, frozen=True):
    """The master's state in the loaded checkpoint; None if there was no checkpoint."""

    master_state: dict[str, Any] | None


class LoadCheckpoint(Request[LoadedCheckpoint], frozen=True):
    """Restore the newest whole checkpoint in the folder `root`."""

    root: str


MEMORY_CHECKPOINT_LOST = "MemoryCheckpointLost"
"""Name of the error by which a rank reports that the in-memory checkpoint is lost; the master handles it separately."""


class LoadMemoryCheckpoint(Request[LoadedCheckpoint], frozen=True):
    """Restore the in-memory checkpoint. Fails with MemoryCheckpointLost if other processes may know a later step."""
