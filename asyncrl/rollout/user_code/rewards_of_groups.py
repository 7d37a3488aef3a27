"""Optional: rewards of whole episodes and of groups, which are added once the agent has returned its samples."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from asyncrl.api import Episode, GroupClient, Prompt, Sample, Tokenizer, answer_text
from asyncrl.api.agent import play_with_retries
from asyncrl.api.picture import Picture
from asyncrl.rollout.user_code.rewards import (
    NO_REWARD,
    Added,
    Embedder,
    RewardPart,
    Rewards,
    given,
    stand_in,
    summed,
)
from asyncrl.rollout.user_code_pool.call_records import UserCodeError
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner


class RewardsOfGroups(Rewards):
    """`Rewards`, of which some see an episode or a group.

    Args:
        tokenizer: decodes samples.
    """

    def __init__(self, parts: Sequence[RewardPart], runner: UserCodeRunner, tokenizer: Tokenizer) -> None:
        super().__init__(parts, runner)
        self._tokenizer = tokenizer

    async def score(self, prompt: Prompt, samples: Sequence[Sample], client: GroupClient) -> Sequence[Sample]:
        """Return the agent's samples with the rewards of episodes and groups; each sample of an episode is scored.

        If an episode's rewards fail, the episode is scored again, and is lost after its last attempt. If a group's
        rewards fail, the group fails.

        Raises:
            UserCodeError: as for `answer`, of a reward of groups.
        """
        if not samples:
            return samples
        seen = [episode_of(prompt, sample, self._tokenizer) for sample in samples]
        by_episode: defaultdict[int, list[int]] = defaultdict(list)
        for at, sample in enumerate(samples):
            by_episode[sample.episode].append(at)

        async def score(member: int) -> Sequence[tuple[int, Added]]:
            async def play(_: Prompt) -> Sequence[tuple[int, Added]]:
                added = await asyncio.gather(*(self._of_episode(seen[at]) for at in by_episode[member]))
                return list(zip(by_episode[member], added, strict=True))

            return await play_with_retries(prompt.of_member(member), play, client, limited=False)

        async with asyncio.TaskGroup() as tasks:
            scoring = [tasks.create_task(score(member)) for member in by_episode]
        own = dict(scored for task in scoring for scored in task.result())
        kept = sorted(own)
        of_group = await self._of_the_group([seen[at] for at in kept])
        return [_with(_with(samples[at], own[at]), added) for at, added in zip(kept, of_group, strict=True)]

    async def _of_episode(self, episode: Episode) -> Added:
        parts = self._for(self._of_episodes, episode.data)
        return summed(await asyncio.gather(*(self._one(part, episode) for part in parts)))

    async def _of_the_group(self, group: Sequence[Episode]) -> list[Added]:
        """Return the sum of the rewards of groups for each sample, `[S]`."""
        parts = self._for(self._of_groups, group[0].data) if group else ()
        if parts and self.embedder is not None and len({each.episode for each in group}) > 1:
            group = await with_embeddings(group, self.embedder)
        by_part = await asyncio.gather(*(self._of_group(part, group) for part in parts))
        return [summed([values[number] for values in by_part]) for number in range(len(group))]

    async def _of_group(self, part: RewardPart, group: Sequence[Episode]) -> list[Added | None]:
        try:
            values = await self._runner.call(part.code, part.function, list(group))
            try:
                values = list(values)
            except TypeError:
                message = f"returned {values!r:.80} for a group; return a list"
                raise UserCodeError(part.code.label, message, how=NO_REWARD) from None
            if len(values) != len(group):
                message = f"returned {len(values)} rewards for a group of {len(group)} samples; return one for each"
                raise UserCodeError(part.code.label, message, how=NO_REWARD)
            return [given(part, value) for value in values]
        except UserCodeError as error:
            return [stand_in(part, error) for _ in group]


async def with_embeddings(group: Sequence[Episode], embedder: Embedder) -> list[Episode]:
    """Return the samples of `group` with the embeddings of their episodes; an episode without frames has none.

    Raises:
        UserCodeError: the frames could not be embedded.
    """
    frames: dict[int, list[Picture]] = {}
    for sample in group:
        if sample.frames:
            frames.setdefault(sample.episode, []).extend(sample.frames)
    vectors = dict(zip(frames, await embedder(list(frames.values())), strict=True)) if frames else {}
    return [replace(sample, embedding=vectors.get(sample.episode, ())) for sample in group]


def _with(sample: Sample, added: Added) -> Sample:
    more, parts = added
    return replace(sample, reward=sample.reward + more, reward_parts={**sample.reward_parts, **parts})


def episode_of(prompt: Prompt, sample: Sample, tokenizer: Tokenizer) -> Episode:
    """Convert `sample` to the form that rewards receive."""
    mask = sample.loss_mask.astype(bool).tolist()
    tokens = sample.tokens.tolist()
    first = mask.index(True) if any(mask) else len(mask)
    stretches = groupby(range(first, len(tokens)), key=mask.__getitem__)
    turns = [(places[0], places[-1] + 1) for generated, stretch in stretches if generated for places in [[*stretch]]]
    return Episode(
        data=prompt.data,
        prompt=tokenizer.decode(tokens[:first]),
        turns=tuple(answer_text(tokenizer, tokens[:begin], tokens[begin:end]) for begin, end in turns),
        response=tokenizer.decode(tokens[first:]),
        generated_tokens=sample.generated_length,
        truncated=sample.truncated,
        reward=float(sample.total_reward),
        episode=sample.episode,
        version=int(sample.versions.max()),
        metrics=sample.metrics,
        frames=sample.frames,
    )
