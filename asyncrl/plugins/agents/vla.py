"""An agent for vision-language-action policies: each turn shows the instruction and the current view; actions answer
it.

A turn's context has no history: it is the prompt's messages, with the newest observation before their text. The answer
is a chunk of action tokens (`rollout.sampling.allowed_token_ids`), and the actions are done one after the other. Each
turn is a separate conversation and so a sample of the episode; all samples have the episode's reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.api import Agent, ChatClient, Environment, Prompt, Sample, Tokenizer, messages_of
from asyncrl.api.picture import Picture, evenly
from asyncrl.data.picture_parts import Content, joined, observed

SUCCESSES = ("success", "is_success")
"""Keys of an info that report success. Without them, an episode that terminates with a reward above 0 is a success."""


@dataclass(frozen=True, slots=True)
class ActionTokens:
    """Actions as tokens: a chunk of `chunk` actions of `dimensions` numbers each; see `OPENVLA_OFT`.

    With N action tokens, `low` ... `high` is cut into N - 1 equal bins. A number is the centre of its bin, and the last
    two tokens mean the last bin, as OpenVLA's tokenizer has it (`ActionTokenizer`: 256 tokens, 255 bins). Without
    dimensions an action is one token, and is the token's text.

    Attributes:
        descending: the token with the highest id is the lowest bin, as in OpenVLA, where action tokens count down from
            the end of the vocabulary.
    """

    chunk: int = 1
    dimensions: int = 0
    low: float = -1.0
    high: float = 1.0
    descending: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError if a number is out of its bounds."""
        if self.chunk < 1 or self.dimensions < 0 or not self.low < self.high:
            raise ValueError(
                f"actions have chunk {self.chunk}, dimensions {self.dimensions}, low {self.low:g} and high "
                f"{self.high:g}: give a chunk of at least 1, no negative dimensions, and low < high"
            )

    @property
    def tokens(self) -> int:
        """Tokens of a chunk."""
        return self.chunk * max(1, self.dimensions)

    def numbers(self, token_ids: Sequence[int], allowed: Sequence[int]) -> NDArray[np.float64]:
        """Decode `token_ids` into numbers, `[actions, dimensions]`; an incomplete last action is dropped.

        Args:
            allowed: the action tokens, in ascending order, at least two.

        Raises:
            ValueError: an id is no action token.
        """
        if not set(token_ids) <= set(allowed):
            raise ValueError(f"the answer {list(token_ids)} has tokens that are no action tokens")
        edges = np.linspace(self.low, self.high, len(allowed))
        centres = (edges[1:] + edges[:-1]) / 2
        index = np.searchsorted(allowed, token_ids)
        bins = len(allowed) - 1 - index if self.descending else index
        whole = len(token_ids) // self.dimensions
        numbers: NDArray[np.float64] = centres[bins.clip(max=len(centres) - 1)]
        return numbers[: whole * self.dimensions].reshape(whole, self.dimensions)

    def ids(self, numbers: ArrayLike, allowed: Sequence[int]) -> list[int]:
        """Encode actions as tokens, for demonstrations; numbers are clipped to `low` and `high`."""
        edges = np.linspace(self.low, self.high, len(allowed))
        bins = np.digitize(np.clip(np.ravel(numbers), self.low, self.high), edges) - 1
        indices = len(allowed) - 1 - bins if self.descending else bins
        return [allowed[index] for index in indices.tolist()]


OPENVLA_OFT = ActionTokens(chunk=8, dimensions=7, descending=True)
"""LIBERO's actions in OpenVLA-OFT (arXiv:2502.19645): 8 actions of 7 normalised numbers between -1 and 1. Their tokens
are the last 256 of Llama 2's vocabulary: `allowed_token_ids: 31744-31999`."""
PRESETS = {"openvla_oft": OPENVLA_OFT}


class EpisodeReward(StrEnum):
    """Reward of an episode, before rewards of groups are added."""

    success = auto()
    """1 for a success, 0 otherwise."""
    total = auto()
    """The sum of the environment's rewards."""


class VLAAgent(Agent):
    """Plays one episode of up to `max_turns` chunks; see the module's docstring.

    Samples have the metrics `success`, `steps`, `return` and, if the environment's infos have it, `progress` at the
    last step. The last sample holds the frames: of each observation the frame itself, or its first picture.

    Args:
        tokenizer: the run's tokenizer.
        chat: True if there is a chat template, which is required.
        max_turns: limit on chunks, at least 1.
        actions: a preset's name, or arguments of `ActionTokens`.
        reward: `success` or `total`.
        frames: number of frames for rewards, evenly chosen from first to last; 0 for none.

    Raises:
        ValueError: an argument is out of its bounds, or there is no chat template.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        chat: bool = False,
        max_turns: int = 64,
        actions: str | Mapping[str, Any] = "openvla_oft",
        reward: str = "success",
        frames: int = 64,
    ) -> None:
        if not chat:
            raise ValueError("VLAAgent shows observations in messages: it needs a chat template, dataset.chat_template")
        if max_turns < 1 or frames < 0:
            raise ValueError(f"agent max_turns is {max_turns} and frames {frames}: give at least 1, and at least 0")
        if isinstance(actions, str) and actions not in PRESETS:
            raise ValueError(f"agent actions is {actions!r}: name {', '.join(PRESETS)}, or give chunk and dimensions")
        self._actions = PRESETS[actions] if isinstance(actions, str) else ActionTokens(**actions)
        self._tokenizer, self._max_turns, self._frames = tokenizer, max_turns, frames
        self._reward = EpisodeReward(reward)

    async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> Sequence[Sample]:
        """Return the episode's turns, each a sample.

        Raises:
            ValueError: there are no action tokens.
        """
        if len(prompt.sampling.allowed_token_ids) < 2:
            raise ValueError("VLAAgent wants the policy's action tokens: name them, rollout.sampling.allowed_token_ids")
        episode = _Episode(env, await env.reset(seed=prompt.data.get("seed"), options={"data": prompt.data}))
        *before, last = messages_of(prompt)
        sampling = replace(prompt.sampling, max_new_tokens=self._actions.tokens)
        for _ in range(self._max_turns):
            shown = {**last, "content": _before(episode.observation, last["content"])}
            reply = await client.chat([*before, shown], sampling=sampling)
            await episode.do(self._meant(reply.completion.token_ids, prompt.sampling.allowed_token_ids))
            if episode.ended or len(reply.completion.token_ids) < self._actions.tokens:  # the context is full
                break
        reward = float(episode.succeeded) if self._reward is EpisodeReward.success else episode.total
        samples = [
            replace(sample, truncated=False, metrics=episode.metrics, frames=()) for sample in client.samples(reward)
        ]
        frames = episode.frames if len(episode.frames) <= self._frames else evenly(episode.frames, self._frames)
        return [*samples[:-1], replace(samples[-1], frames=tuple(frames[: self._frames]))] if samples else []

    def _meant(self, token_ids: Sequence[int], allowed: Sequence[int]) -> list[Any]:
        """Decode the actions of an answer: lists of numbers, or texts."""
        if self._actions.dimensions:
            numbers: list[Any] = self._actions.numbers(token_ids, allowed).tolist()
            return numbers
        return [self._tokenizer.decode([token]).strip() for token in token_ids]


def _before(observation: Content, text: Content) -> Content:
    """Return the observation followed by `text`, on a separate line if the observation ends in text."""
    ends_in_text = isinstance(observation, str) or observation[-1]["type"] == "text"
    return joined(observation, "\n" if ends_in_text else "", text)


class _Episode:
    """An episode so far."""

    def __init__(self, env: Environment, begun: tuple[Any, Mapping[str, Any]]) -> None:
        self._env, (observation, self._info) = env, begun
        self.ended, self.succeeded, self.total, self._steps = False, False, 0.0, 0
        self.frames: list[Picture] = []
        self.observation = self._seen(observation)

    async def do(self, actions: Sequence[Any]) -> None:
        """Do `actions` one by one, until the episode ends."""
        for action in actions:
            observation, reward, terminated, truncated, self._info = await self._env.step(action)
            self.observation = self._seen(observation)
            self.total, self._steps = self.total + float(reward), self._steps + 1
            successes = [bool(self._info[name]) for name in SUCCESSES if name in self._info]
            self.succeeded = any(successes) if successes else bool(terminated and reward > 0)
            self.ended = bool(terminated or truncated or self.succeeded)
            if self.ended:
                return

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the episode's samples."""
        known = {"progress": float(self._info["progress"])} if "progress" in self._info else {}
        return {"success": float(self.succeeded), "steps": float(self._steps), "return": self.total, **known}

    def _seen(self, observation: Any) -> Content:
        content = observed(observation)
        parts = [] if isinstance(content, str) else content
        self.frames += [part["image"] for part in parts if part["type"] == "image"][:1]
        return content
