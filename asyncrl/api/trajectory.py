"""A finished rollout: a prompt's group of samples, each token with its policy version and behaviour log-probability.

A group consists of episodes. Each episode gives one or more samples, one per conversation of the policy in it.
Baselines and filters count episodes (`Sample.episode`), so an episode with many samples counts as much as an episode
with one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from numbers import Integral
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from asyncrl.api.picture import Picture, PlacedPicture, check_spans

MAX_EPISODE = (1 << 31) - 1
NOT_GENERATED = -1
"""Version of a token that no policy generated."""
GREEDY_REWARD = "agent/greedy_reward"
"""Reward of a greedy answer to a trajectory's prompt, which is ReMax's baseline."""
FINISHED_AT = "rollout/finished_at"
"""Metric of a trajectory in transit: time at which its rollout finished, in seconds since 1970."""
POLICY_SERVERS = "policy_server/"
"""Prefix of a trajectory's metrics of other policies in its episodes: `policy_server/<name>/oldest_version`,
`newest_version` and `version`, the mean over their tokens."""
WON = "won/"
"""Prefix of a sample's metric for `pick: prioritised`: the result against an opponent, 0 to 1, as `won/<name>`."""
GENERATED = "rollout/generated/"
"""Prefix of a trajectory's metrics of the tokens that each trained policy generated, if there are several:
`rollout/generated/<name>`, with `actor` for the run's own."""
MAX_GROUPS, MAX_GROUP_LENGTH = 255, 64
"""Limits of comparison groups: number of names in one trajectory, characters of a name."""
MAX_REWARD = 1e30
"""Largest size of a reward. Advantages are in float32, where the difference of two larger rewards could be infinite."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence of a group. Every array is aligned with `tokens` and has shape `[T]`.

    T counts prompt, generated and environment tokens. The arrays are shared, not copied: leave them unchanged.

    Raises:
        ValueError: an array's length differs from that of `tokens`, the sample is empty, `episode` is negative, `group`
            is not a valid name, a reward is at a token that was not generated, a picture is at a generated token, or a
            reward, a metric or a log-probability is not finite (it would turn the gradient of a whole minibatch into
            NaN).
    """

    tokens: NDArray[np.int32]
    """Token ids."""
    loss_mask: NDArray[np.uint8]
    """1 where the policy generated the token, 0 for prompt and environment tokens."""
    behave_logprobs: NDArray[np.float32]
    """Natural-log probability of the token under the distribution that it was sampled from; 0 where not generated."""
    versions: NDArray[np.int32]
    """Policy version that generated the token; -1 where not generated."""
    reward: float
    truncated: bool = False
    """True if a length limit cut the answer off."""
    episode: int = 0
    """Member of the group that this sample belongs to, from 0 on. Several samples may belong to one member."""
    token_rewards: NDArray[np.float32] | None = None
    """Rewards of turns, each at the last token of its turn; they are added to `reward`."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward by name, for the log only: `reward/<name>`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The agent's own numbers, logged as `agent/<name>`."""
    routing: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """`[T, layers, per_token]`: experts of each token and layer in a mixture of experts during generation, and
    `unrecorded` for tokens without a report (`routing_of_turns`)."""
    token_columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """The agent's own numbers for generated tokens by name, 0 at all others; the column `token/<name>` if
    `rollout.columns` declares it."""
    pictures: tuple[PlacedPicture, ...] = ()
    """The pictures that the policy saw, in order of position."""
    group: str = ""
    """Comparison group: a sample is compared only with samples of the rollout in the same group. The part before a `/`
    is the role (`role_of`), by which metrics and the baselines of `rae` are kept. Samples of a further trained policy
    have its name as their role. See also `compared_episodes`."""
    frames: tuple[Picture, ...] = ()
    """Pictures of the episode, in order, for rewards (`Episode.frames`); training does not receive them. In an episode
    with several samples the last one has them."""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        if length == 0:
            raise ValueError("Sample.tokens is empty: a sample holds at least its prompt")
        for name in ("loss_mask", "behave_logprobs", "versions"):
            shape = getattr(self, name).shape
            if shape != (length,):
                raise ValueError(f"Sample.{name} has shape {shape}, expected ({length},) as Sample.tokens")
        if self.reward is None or not abs(self.reward) <= MAX_REWARD:
            raise ValueError(
                f"Sample.reward is {self.reward}: the reward of an answer is a finite number, of at most {MAX_REWARD:g}"
            )
        finite_T = np.isfinite(self.behave_logprobs)
        if not finite_T.all():
            position = int(finite_T.argmin())
            raise ValueError(
                f"Sample.behave_logprobs[{position}] is {self.behave_logprobs[position]}: the policy gives every token "
                "that it generates a finite log-probability, and other tokens have 0"
            )
        if not isinstance(self.episode, Integral) or not 0 <= self.episode <= MAX_EPISODE:
            raise ValueError(f"Sample.episode is {self.episode}: the members of a group are integers from 0 on")
        check_group(self.group)
        if self.token_rewards is not None:
            self._check_token_rewards(self.token_rewards)
        if self.routing is not None and (self.routing.ndim != 3 or len(self.routing) != length):
            raise ValueError(
                f"Sample.routing has shape {self.routing.shape}, expected ({length}, layers, experts of a token)"
            )
        for name, column in self.token_columns.items():
            self._check_token_column(name, column)
        if self.pictures:
            self._check_pictures()
        for name, numbers in (("reward_parts", self.reward_parts), ("metrics", self.metrics)):
            for key, number in numbers.items():
                if not math.isfinite(number):
                    raise ValueError(f"Sample.{name}[{key!r}] is {number}: use finite numbers")

    def _check_token_rewards(self, rewards_T: NDArray[np.float32]) -> None:
        if rewards_T.shape != self.tokens.shape:
            raise ValueError(
                f"Sample.token_rewards has shape {rewards_T.shape}, expected ({len(self.tokens)},) as Sample.tokens"
            )
        if not (np.abs(rewards_T) <= MAX_REWARD).all():
            raise ValueError(
                "Sample.token_rewards holds a NaN, an infinity or more than "
                f"{MAX_REWARD:g}: rewards are finite numbers of at most that size"
            )
        misplaced_T = (rewards_T != 0) & (self.loss_mask == 0)
        if misplaced_T.any():
            position = int(misplaced_T.argmax())
            raise ValueError(
                f"Sample.token_rewards[{position}] is {rewards_T[position]}, and the policy did not generate that "
                "token: a turn's reward goes to the last token that the policy wrote in it"
            )

    def _check_token_column(self, name: str, column_T: NDArray[np.float32]) -> None:
        if column_T.shape != self.tokens.shape or column_T.dtype.kind not in "fiub":
            raise ValueError(
                f"Sample.token_columns[{name!r}] is {column_T.dtype} {column_T.shape}, expected numbers "
                f"({len(self.tokens)},) as Sample.tokens"
            )
        if not np.isfinite(column_T).all() or ((column_T != 0) & (self.loss_mask == 0)).any():
            raise ValueError(
                f"Sample.token_columns[{name!r}] has a number that is not finite, or not 0 at a token that the policy "
                "did not generate: give finite numbers to generated tokens and 0 to the others"
            )

    def _check_pictures(self) -> None:
        try:
            check_spans(self.pictures, len(self.tokens))
        except ValueError as error:
            raise ValueError(f"Sample.pictures: {error}") from None
        for placed in self.pictures:
            if self.loss_mask[placed.position : placed.end].any():
                raise ValueError(
                    f"Sample.pictures has a picture at position {placed.position}, and the policy generated a token of "
                    "its span: a picture stands at tokens that were given"
                )

    @property
    def total_reward(self) -> float:
        """`reward` and the rewards of its turns."""
        if self.token_rewards is None:
            return self.reward
        return self.reward + float(self.token_rewards.sum(dtype=np.float64))

    @property
    def generated_length(self) -> int:
        """Number of generated tokens."""
        return int(self.loss_mask.sum())


def check_group(name: str) -> None:
    """Raise ValueError unless `name` is a valid comparison group: "" or printable text of at most 64 characters."""
    if len(name) > MAX_GROUP_LENGTH or not name.isprintable():
        raise ValueError(
            f"comparison group {name!r:.100}: use printable text of at most {MAX_GROUP_LENGTH} characters, such as "
            "'judge' or 'solver/3'"
        )


def role_of(group: str) -> str:
    """Return the role that a comparison group belongs to: its name up to the first `/`."""
    return group.partition("/")[0]


def policy_of(group: str, policies: Collection[str]) -> str:
    """Return the trained policy, one of `policies`, of the samples of a comparison group; "" for the run's own.

    The policy's name is the role of the group, which the policy's clients set (`client.policy(name)`).
    """
    role = role_of(group)
    return role if role in policies else ""


def compared_episodes(episodes: Sequence[int], groups: Sequence[str]) -> list[int]:
    """Return, for each sample of a rollout, the episode that it counts as in its comparison group.

    That is normally its own episode. If all samples of a named group belong to one episode, such as the solutions to a
    problem posed in it, each solution counts as a separate episode, because the solutions can only be compared with
    each other.

    Args:
        groups: names of the samples' comparison groups; empty if none is named.
    """
    members: dict[str, list[int]] = {}
    for position, name in enumerate(groups):
        members.setdefault(name, []).append(position)
    counted = list(episodes)
    for name, positions in members.items():
        if name and len({episodes[at] for at in positions}) == 1:
            for number, at in enumerate(positions):
                counted[at] = number
    return counted


@dataclass(frozen=True, slots=True, eq=False)
class SampleColumns(Sequence[Sample]):
    """S samples with their T tokens end to end: the form for transport and for training.

    As a sequence it builds each sample on access, with arrays that are views into the columns.
    """

    tokens: NDArray[np.int32]
    """`[T]`, as are the next three; see `Sample`."""
    loss_mask: NDArray[np.uint8]
    behave_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    lengths: NDArray[np.int64]
    """`[S]`: tokens of each sample, at least 1; their sum is T."""
    rewards: NDArray[np.float64]
    """`[S]`."""
    truncated: NDArray[np.uint8]
    """`[S]`, 0 or 1."""
    episodes: NDArray[np.int32]
    """`[S]`, at least 0; see `Sample.episode`."""
    token_rewards: NDArray[np.float32] | None = None
    """`[T]`, 0 at tokens without a reward; None if no sample has rewards of turns."""
    reward_parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """`[S]` for each name, NaN for samples without it; `metrics` have the same form."""
    metrics: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    routing: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """`[T, layers, per_token]`; None if a sample lacks routing."""
    token_columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """`[T]` for each name, 0 for samples without it."""
    pictures: tuple[tuple[PlacedPicture, ...], ...] = ()
    """`[S]`: pictures of each sample, at positions within it; empty if no sample has any."""
    groups: tuple[str, ...] = ()
    """`[S]`: comparison group of each sample; empty if no sample names one."""

    @classmethod
    def join(cls, samples: Sequence[Sample]) -> SampleColumns:
        """Return `samples`, at least one, as columns; they are copied unless they are columns already."""
        if isinstance(samples, SampleColumns):
            return samples
        if isinstance(samples, SharedPrompt):
            return samples.whole()
        return cls(
            np.concatenate([sample.tokens for sample in samples]),
            np.concatenate([sample.loss_mask for sample in samples]),
            np.concatenate([sample.behave_logprobs for sample in samples]),
            np.concatenate([sample.versions for sample in samples]),
            np.array([len(sample.tokens) for sample in samples], np.int64),
            np.array([sample.reward for sample in samples], np.float64),
            np.array([sample.truncated for sample in samples], np.uint8),
            np.array([sample.episode for sample in samples], np.int32),
            join_token_rewards(samples),
            named_columns([sample.reward_parts for sample in samples]),
            named_columns([sample.metrics for sample in samples]),
            join_routing([sample.routing for sample in samples]),
            join_token_columns(samples),
            join_pictures(samples),
            join_groups(samples),
        )

    @property
    def total_rewards(self) -> NDArray[np.float64]:
        """`[S]`: the reward of each sample and of its turns."""
        if self.token_rewards is None:
            return self.rewards
        return self.rewards + np.add.reduceat(self.token_rewards, self.starts, dtype=np.float64)

    @property
    def starts(self) -> NDArray[np.int64]:
        """`[S]`: position in T of each sample's first token."""
        return np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Sample]:
        ends = list(accumulate(self.lengths.tolist()))
        by_sample = zip(
            [0, *ends],
            ends,
            self.rewards.tolist(),
            self.truncated.tolist(),
            self.episodes.tolist(),
            _by_sample(self.reward_parts, len(self)),
            _by_sample(self.metrics, len(self)),
            self.pictures or [()] * len(self),
            self.groups or [""] * len(self),
            strict=False,
        )
        for start, end, reward, truncated, episode, reward_parts, metrics, pictures, group in by_sample:
            yield Sample(
                self.tokens[start:end],
                self.loss_mask[start:end],
                self.behave_logprobs[start:end],
                self.versions[start:end],
                reward,
                bool(truncated),
                episode,
                None if self.token_rewards is None else self.token_rewards[start:end],
                reward_parts,
                metrics,
                None if self.routing is None else self.routing[start:end],
                {name: column[start:end] for name, column in self.token_columns.items()},
                pictures,
                group,
            )

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Sample, ...]: ...
    def __getitem__(self, index: int | slice) -> Sample | tuple[Sample, ...]:
        return tuple(self)[index]


def with_turn_rewards(samples: Sequence[Sample], rewards: Sequence[float]) -> list[Sample]:
    """Return the samples of one episode with the rewards of its turns, each at the last token of its turn.

    A turn is an unbroken run of generated tokens. Turns are counted over all samples, in the order in which a client
    records them.

    Raises:
        ValueError: the number of turns differs from the number of rewards.
    """
    last_of_turns = [
        (number, int(position))
        for number, sample in enumerate(samples)
        for position in np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8), append=0) == -1)
    ]
    if len(last_of_turns) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards of turns are given, and the samples have {len(last_of_turns)} turns")
    columns = [np.zeros(len(sample.tokens), np.float32) for sample in samples]
    for (number, position), reward in zip(last_of_turns, rewards, strict=True):
        columns[number][position] = reward
    return [replace(sample, token_rewards=column) for sample, column in zip(samples, columns, strict=True)]


def join_token_rewards(samples: Sequence[Sample]) -> NDArray[np.float32] | None:
    """Return the rewards of the turns of `samples`, `[T]`, 0 for samples without; None if no sample has any."""
    if all([sample.token_rewards is None for sample in samples]):
        return None
    return np.concatenate(
        [
            np.zeros(len(sample.tokens), np.float32)
            if sample.token_rewards is None
            else sample.token_rewards.astype(np.float32, copy=False)
            for sample in samples
        ]
    )


def join_groups(samples: Sequence[Sample]) -> tuple[str, ...]:
    """Return the comparison groups of `samples`, `[S]`; empty if no sample names one."""
    groups = [sample.group for sample in samples]
    return tuple(groups) if any(groups) else ()


def join_token_columns(samples: Sequence[Sample]) -> dict[str, NDArray[np.float32]]:
    """Return the token columns of `samples` by name, `[T]` each, 0 for samples without the column."""
    if not any([sample.token_columns for sample in samples]):
        return {}
    names = dict.fromkeys(name for sample in samples for name in sample.token_columns)
    return {
        name: np.concatenate(
            [sample.token_columns.get(name, np.zeros(len(sample.tokens))).astype(np.float32) for sample in samples]
        )
        for name in names
    }


def join_pictures(samples: Sequence[Sample]) -> tuple[tuple[PlacedPicture, ...], ...]:
    """Return the pictures of each sample; empty if no sample has any."""
    pictures = [sample.pictures for sample in samples]
    return tuple(pictures) if any(pictures) else ()


def unrecorded(dtype: np.dtype[Any]) -> int:
    """Return the value in `routing` for tokens without a reported expert: the largest value of this type."""
    return int(np.iinfo(dtype).max)


def routing_of_turns(length: int, routings: Iterable[NDArray[Any] | None]) -> NDArray[Any] | None:
    """Return the routing `[length, layers, per_token]` of a conversation from its answers' reports; None without any.

    Each answer reports the experts of all tokens up to its last but one, those of earlier turns again. The first report
    of a token counts: it is from the forward pass that sampled the next token.
    """
    known = [each for each in routings if each is not None]
    if not known:
        return None
    dtype = known[0].dtype
    routing: NDArray[Any] = np.full((length, *known[0].shape[1:]), unrecorded(dtype), dtype)
    have = 0
    for each in known:
        routing[have : len(each)] = each[have:]
        have = max(have, len(each))
    return routing


def join_routing(parts: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    """Concatenate `parts`, at least one; None if a part is missing."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None


def named_columns(by_sample: Sequence[Mapping[str, float]]) -> dict[str, NDArray[np.float64]]:
    """Return a column `[S]` for every name in the S mappings, NaN for mappings without the name."""
    if not any(by_sample):
        return {}
    names = dict.fromkeys(name for numbers in by_sample for name in numbers)
    return {name: np.array([numbers.get(name, math.nan) for numbers in by_sample]) for name in names}


def _by_sample(columns: Mapping[str, NDArray[np.float64]], samples: int) -> list[dict[str, float]]:
    """Invert `named_columns`."""
    made: list[dict[str, float]] = [{} for _ in range(samples)]
    for name, column in columns.items():
        for numbers, number in zip(made, column.tolist(), strict=True):
            if not math.isnan(number):
                numbers[name] = number
    return made


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompt(Sequence[Sample]):
    """S samples that begin with the same prompt, which is stored once: the form of a group in transport and in the
    inbox.

    As a sequence it builds whole samples, prompt and rest, on access.
    """

    prompt: NDArray[np.int32]
    """`[P]`: the common first tokens of all samples, none of them generated."""
    rest: SampleColumns
    """Tokens after the prompt of each sample. A length of 0 is possible here."""
    routing: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """`[P, layers, per_token]`: routing of the prompt, if `rest` has routing too."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures of the prompt. The positions of `rest.pictures` count from the prompt's end."""

    def whole(self) -> SampleColumns:
        """Return the columns of the samples, prompts included; copied at each call."""
        rest, size = self.rest, len(self.prompt)
        ends = np.cumsum(rest.lengths)[:-1]

        def repeat(prompt: NDArray[Any], column: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([part for own in np.split(column, ends) for part in (prompt, own)])

        no_rewards = np.zeros(size, np.float32)
        pictures: tuple[tuple[PlacedPicture, ...], ...] = ()
        if self.pictures or rest.pictures:
            pictures = tuple(
                (*self.pictures, *(placed.shifted(size) for placed in own)) for own in rest.pictures or [()] * len(rest)
            )
        return SampleColumns(
            repeat(self.prompt, rest.tokens),
            repeat(np.zeros(size, np.uint8), rest.loss_mask),
            repeat(np.zeros(size, np.float32), rest.behave_logprobs),
            repeat(np.full(size, NOT_GENERATED, np.int32), rest.versions),
            rest.lengths + size,
            rest.rewards,
            rest.truncated,
            rest.episodes,
            None if rest.token_rewards is None else repeat(no_rewards, rest.token_rewards),
            rest.reward_parts,
            rest.metrics,
            None if rest.routing is None or self.routing is None else repeat(self.routing, rest.routing),
            {name: repeat(no_rewards, column) for name, column in rest.token_columns.items()},
            pictures,
            rest.groups,
        )

    def __len__(self) -> int:
        return len(self.rest)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.whole())

    def __getitem__(self, index: Any) -> Any:
        return self.whole()[index]


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A rollout: the samples of one prompt, at least one.

    `rollout_id` names this attempt and is unique in the run. `prompt_id` names the prompt within its epoch; a prompt
    that is dropped and tried again keeps it. `order` is the prompt's position in the data order, over all epochs;
    training batches are sorted by it, regardless of the order in which rollouts finished. A trajectory received over a
    socket has its samples in columns, with their common prompt once.
    """

    rollout_id: str
    prompt_id: str
    order: int
    samples: Sequence[Sample]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def columns(self) -> SampleColumns:
        """The samples as columns, joined at each access unless they are columns already."""
        return SampleColumns.join(self.samples)

    @property
    def pictures(self) -> dict[str, Picture]:
        """The pictures of all samples by hash, each once."""
        samples = self.samples
        held: Iterable[Iterable[PlacedPicture]]
        if isinstance(samples, SharedPrompt):
            held = (samples.pictures, *samples.rest.pictures)
        else:
            held = samples.pictures if isinstance(samples, SampleColumns) else [each.pictures for each in samples]
        return {placed.picture.sha256: placed.picture for own in held for placed in own}
