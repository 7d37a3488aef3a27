"""A prompt as an agent receives it, its requests to the policy, and their results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from typing import Any, Protocol

from numpy.typing import NDArray

from asyncrl.api.picture import PlacedPicture


class FinishReason(StrEnum):
    """Reason why a continuation ended. Members are strings: `finish_reason == "length"` holds too."""

    stop = auto()
    """At a stop token or stop string, or at the model's own end token."""
    length = auto()
    """At `max_new_tokens`."""
    abort = auto()
    """Interrupted; agents never receive this."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. `temperature` 0 is greedy; `top_k` -1 keeps every token; lengths are in tokens."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; empty: all. Log-probabilities are of the distribution over these tokens.
    Training uses the distribution over `rollout.sampling.allowed_token_ids`, so an answer drawn from other tokens
    cannot be trained.
    """
    stop: tuple[str, ...] = ()
    """Texts that end an answer. The answer keeps its tokens up to and including the one that completes such a text."""
    seed: int | None = None
    """Base seed of the request; sample i of a group has its own random stream, derived from (seed, i)."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for `n` continuations of `input_ids`, or with `score_from` for log-probabilities of `input_ids` itself.

    The result carries the same `request_id`.

    `pictures` stand at spans of `input_ids`, in order; their placeholders are in `input_ids`, one for each row of
    vectors that the model makes of the picture. A chat template puts them there (`ChatClient.chat`).
    """

    request_id: str
    input_ids: tuple[int, ...]
    n: int
    sampling: SamplingParams
    pictures: tuple[PlacedPicture, ...] = ()
    policy: str = ""
    """Name of the policy in `policies` that answers; empty for the trained policy."""
    score_from: int | None = None
    """Position in `input_ids`, 1 or more: nothing is generated, and `GenerationResult.scores` has the log-probabilities
    of the tokens from there on, at temperature 1, of the policy as it is now."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation: three lists of one length, with the version that produced each token.

    `routing` is set with `moe.replay_routing`: the experts of each token of the request and the answer, except the last
    token, `[P + T - 1, layers, per_token]`; see `Sample.routing`.

    `policy` is the name of the policy in `policies` that answered, empty for the trained policy. Other models have
    version 0.

    `cached_tokens` is the number of the request's tokens that the server had in its cache and did not compute.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    routing: NDArray[Any] | None = None
    policy: str = ""
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The answer to a `GenerationRequest`: `completions` has `n` entries; it is empty if the request asked for
    `scores`.
    """

    request_id: str
    completions: tuple[Completion, ...]
    scores: tuple[float, ...] = ()


class GenerationClient(Protocol):
    """Interface of the policy for agents."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return the whole answer to `request`. Several calls may run at the same time.

        Raises:
            Exception: the policy cannot answer. Do not catch it: the rollout is then retried.
        """
        ...


def seed_from(*parts: int | str) -> int:
    """Return a 31-bit seed that depends on all `parts`; seeds of different parts are unrelated.

    Every inference engine accepts 31 bits.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of the dataset, prepared for an agent.

    Attributes:
        prompt_id: name in its epoch, `e<epoch>-<row>`.
        order: position in the data order.
        data: the dataset's row (for the built-in agents: `prompt` and the fields that the reward needs). The prompt is
            shortened if `dataset.overlong` requires it.
        input_ids: tokens of the prompt, with the template's description of the tools if the agent uses them.
        group_size: number of episodes wanted.
        sampling: sampling parameters of the experiment, with the seed of this prompt or of one `member`.
        member: number of the episode in its group.
        pictures: pictures at spans of `input_ids`. An agent that sends token ids passes the pictures with its
            request, and its samples have them.
    """

    prompt_id: str
    order: int
    data: Mapping[str, Any]
    input_ids: tuple[int, ...]
    group_size: int
    sampling: SamplingParams
    member: int = 0
    pictures: tuple[PlacedPicture, ...] = ()

    def of_member(self, member: int) -> Prompt:
        """Return the prompt for episode `member` of the group, with its own seed."""
        seed = self.sampling.seed
        own = None if seed is None else seed_from("member", seed, member)
        return replace(self, member=member, sampling=replace(self.sampling, seed=own))

    def again(self, attempt: int) -> Prompt:
        """Return the episode's prompt for attempt number `attempt`, counted from 0, with a different seed."""
        seed = self.sampling.seed
        own = None if seed is None else seed_from("try", seed, attempt)
        return replace(self, sampling=replace(self.sampling, seed=own))
