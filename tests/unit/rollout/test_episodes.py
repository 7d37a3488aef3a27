"""The members of a group: at the same time, each with its own environment, client and random stream."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.api import (
    Agent,
    ChatClient,
    Completion,
    Environment,
    EpisodeError,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Prompt,
    Sample,
    SamplingParams,
)
from asyncrl.api.agent import agent_of
from asyncrl.chat.conversation import ChatLimits
from asyncrl.chat.episode_client import ChatPolicy, EpisodeClient
from asyncrl.data.tokenizers import CharTokenizer
from asyncrl.plugins.agents.single_turn import SingleTurnAgent
from asyncrl.rollout.episode import RetryLimits, run_group

PROMPT = Prompt("e0-0", 0, {"prompt": "?"}, (1, 2), 3, SamplingParams(seed=5))
ONCE = RetryLimits()
LIMIT_S = 300.0


class Policy:
    """Answers each request with its own seed's last digit; keeps the requests."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.asked.append(request)
        await asyncio.sleep(0)
        token = (request.sampling.seed or 0) % 10
        answers = (Completion([token], [-0.5], [0], FinishReason.stop),) * request.n
        return GenerationResult(request.request_id, answers)

    @property
    def seeds(self) -> list[int | None]:
        return [request.sampling.seed for request in self.asked]


class Env(Environment):
    """Knows how many of it there are and were closed."""

    def __init__(self, made: list[Env]) -> None:
        self.closed, self.state = False, 0
        made.append(self)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.state = 0
        return "", {}

    async def step(self, action: Any) -> Any:
        self.state += 1
        return "", float(self.state), True, False, {}

    async def close(self) -> None:
        self.closed = True


async def roll_out(
    run: Callable[..., Any] | Agent,
    policy: Policy | None = None,
    made: list[Env] | None = None,
    prompt: Prompt = PROMPT,
    tries: RetryLimits = ONCE,
    make: Callable[[list[Env]], Env] | None = None,
) -> Sequence[Sample]:
    samples, _ = await roll_out_counted(run, policy, made, prompt, tries, make)
    return samples


async def roll_out_counted(
    run: Callable[..., Any] | Agent,
    policy: Policy | None = None,
    made: list[Env] | None = None,
    prompt: Prompt = PROMPT,
    tries: RetryLimits = ONCE,
    make: Callable[[list[Env]], Env] | None = None,
    rules: ChatPolicy | None = None,
) -> tuple[Sequence[Sample], dict[str, float]]:
    agent = run if isinstance(run, Agent) else agent_of(run, {})
    environments: list[Env] = [] if made is None else made
    async with asyncio.timeout(LIMIT_S):
        return await run_group(
            agent,
            lambda: (make or Env)(environments),
            prompt,
            policy or Policy(),
            lambda client, own: EpisodeClient(client, own, None, rules),
            tries,
        )


def ask(prompt: Prompt, ids: tuple[int, ...] | None = None) -> GenerationRequest:
    return GenerationRequest(f"{prompt.member}", ids or prompt.input_ids, 1, prompt.sampling)


async def one_turn(prompt: Prompt, env: Environment, client: ChatClient) -> float:
    await client.generate(ask(prompt))
    return float(prompt.member)


async def test_a_number_is_the_reward_of_all_that_the_client_recorded() -> None:
    async def two_conversations(prompt: Prompt, env: Environment, client: ChatClient) -> float:
        await client.generate(ask(prompt))
        if prompt.member == 1:
            await client.generate(ask(prompt, (7, 7)))
        return 0.5 * prompt.member

    samples = await roll_out(two_conversations)
    assert [(sample.episode, sample.reward) for sample in samples] == [(0, 0.0), (1, 0.5), (1, 0.5), (2, 1.0)]
    assert samples[2].tokens[:2].tolist() == [7, 7]
    assert [sample.loss_mask.tolist() for sample in samples] == [[0, 0, 1]] * 4


async def test_members_play_at_the_same_time_each_in_an_environment_of_its_own_which_is_closed() -> None:
    made: list[Env] = []
    playing = asyncio.Event()
    count = 0

    async def waits_for_the_others(prompt: Prompt, env: Environment, client: ChatClient) -> float:
        nonlocal count
        count += 1
        if count == 3:
            playing.set()
        await playing.wait()
        for _ in range(prompt.member):
            await env.step("")
        await client.generate(ask(prompt))
        return float((await env.step(""))[1])

    samples = await roll_out(waits_for_the_others, made=made)
    assert [sample.reward for sample in samples] == [1.0, 2.0, 3.0], "nobody stepped another's environment"
    assert len(made) == 3
    assert all(env.closed for env in made)


async def test_members_draw_from_streams_of_their_own_which_depend_on_prompt_and_member_alone() -> None:
    async def asks_twice(prompt: Prompt, env: Environment, client: ChatClient) -> float:
        for _ in range(2):
            await client.generate(ask(prompt))
        return 0.0

    first, second, other = Policy(), Policy(), Policy()
    await roll_out(asks_twice, first)
    await roll_out(asks_twice, second)
    await roll_out(asks_twice, other, prompt=replace(PROMPT, sampling=SamplingParams(seed=6)))
    assert first.seeds == second.seeds
    assert len({*first.seeds}) == 6, "nor does the second answer draw the numbers of the first"
    assert not {*first.seeds} & {*other.seeds}
    assert PROMPT.of_member(2).sampling.seed == first.asked[2].sampling.seed


async def test_an_episode_may_be_rejected_alone_or_give_several_samples() -> None:
    async def varying(prompt: Prompt, env: Environment, client: ChatClient) -> Any:
        if prompt.member == 0:
            return None
        await client.generate(ask(prompt))
        (sample,) = client.samples(1.0)
        turns = np.array([0, 0, 0.25], np.float32)
        more = replace(sample, token_rewards=turns, metrics={"turns": 1.0})
        return sample if prompt.member == 1 else [sample, more]

    samples = await roll_out(varying)
    assert [sample.episode for sample in samples] == [1, 2, 2]
    assert samples[2].total_reward == 1.25

    async def nothing(prompt: Prompt, env: Environment, client: ChatClient) -> None:
        return None

    assert await roll_out(nothing) == []


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        ("text", "returned 'text'; return a Sample"),
        ([1.0], r"returned \[1.0\]; return"),
        (1.0, "returned the reward 1.0 without asking the policy"),
    ],
)
async def test_an_outcome_that_is_none_names_the_agent_and_what_it_did(outcome: object, message: str) -> None:
    async def wrong(prompt: Prompt, env: Environment, client: ChatClient) -> Any:
        return outcome

    with pytest.raises(EpisodeError, match=f"agent wrong {message}"):
        await roll_out(wrong)


async def fail_with_an_error() -> None:
    raise KeyError("no such field")


async def be_cancelled_from_within() -> None:
    task = asyncio.create_task(asyncio.sleep(10))
    await asyncio.sleep(0)
    task.cancel()
    await task


async def call_exit() -> None:
    sys.exit("enough")


async def fail_in_a_task_group() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail_with_an_error())


@pytest.mark.parametrize(
    ("fail", "how"),
    [
        (fail_with_an_error, "raised KeyError"),
        (be_cancelled_from_within, "raised CancelledError"),
        (call_exit, "raised SystemExit"),
        (fail_in_a_task_group, "raised KeyError"),
    ],
)
async def test_a_member_that_fails_is_tried_again_alone_with_other_numbers_in_an_environment_of_its_own(
    fail: Callable[[], Awaitable[None]], how: str
) -> None:
    made: list[Env] = []
    tries: list[int] = []

    async def fails_twice(prompt: Prompt, env: Environment, client: ChatClient) -> float:
        await client.generate(ask(prompt))
        if prompt.member == 1:
            tries.append(int((await env.step(""))[1]))
            if len(tries) < 3:
                await fail()
        return 1.0

    policy = Policy()
    samples = await roll_out(fails_twice, policy, made, tries=RetryLimits(3))
    assert [sample.episode for sample in samples] == [0, 1, 2], "no conversation of a try that failed is trained"
    assert tries == [1, 1, 1], "a fresh environment each time"
    assert len(set(policy.seeds)) == 5
    assert [env.closed for env in made] == [True] * 5
    tries.clear()
    samples, counted = await roll_out_counted(fails_twice, policy, made, tries=RetryLimits(2))
    assert [sample.episode for sample in samples] == [0, 2]
    assert counted[f"rollout/lost_episodes: agent fails_twice {how}"] == 1.0


async def test_an_episode_that_fails_once_its_context_is_full_names_the_setting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The framework of an agent raises an error of its own then, which says nothing of a context."""

    async def continues(prompt: Prompt, env: Environment, client: ChatClient) -> float | None:
        answer = await client.generate(ask(prompt))
        if prompt.member == 0:
            raise KeyError("no tool call")
        return 1.0 if any(completion.token_ids for completion in answer.completions) else None

    full = ChatPolicy(ChatLimits(max_context=len(PROMPT.input_ids)))
    with pytest.raises(KeyError) as caught:
        await roll_out_counted(continues, tries=RetryLimits(1, least=9), rules=full)
    assert "generation.context_length left no room" in str(caught.value.__notes__)
    assert "agent continues raised KeyError after its context was full (generation.context_length)" in caplog.text
    _, counted = await roll_out_counted(continues, tries=RetryLimits(1))
    assert counted["rollout/lost_episodes: agent continues raised KeyError"] == 1.0


async def test_an_episode_whose_first_prompt_does_not_fit_says_so() -> None:
    """The program behind an endpoint then returned its reward, without an answer."""

    async def program(prompt: Prompt, env: Environment, client: ChatClient) -> float:
        await client.conversation("one").generate(ask(prompt))
        return 0.0

    full = ChatPolicy(ChatLimits(max_context=2))
    why = r"its first prompt of 2 tokens does not fit in generation\.context_length=2 \(prompt e0-0\)"
    with pytest.raises(EpisodeError, match=f"agent program has no sample for the reward 0.0: {why}"):
        await roll_out_counted(program, rules=full)


async def test_too_few_episodes_left_are_the_error_of_the_last_one_that_was_given_up() -> None:
    async def one_remains(prompt: Prompt, env: Environment, client: ChatClient) -> float:
        if prompt.member:
            raise KeyError("no such field")
        await client.generate(ask(prompt))
        return 1.0

    assert len(await roll_out(one_remains)) == 1
    with pytest.raises(KeyError, match="no such field"):
        await roll_out(one_remains, tries=RetryLimits(2, least=2))


async def test_an_answer_that_cannot_be_scored_is_asked_for_anew_and_costs_no_other() -> None:
    """The built-in agent asks for its group at once."""

    class Picky(Env):
        async def step(self, action: Any) -> Any:
            scored.append(action)
            if len(scored) in (2, 4):
                raise ValueError("cannot read this")
            return await super().step(action)

    scored: list[Any] = []
    made: list[Env] = []
    policy = Policy()
    agent = SingleTurnAgent(tokenizer=CharTokenizer())
    samples = await roll_out(agent, policy, made, make=Picky, tries=RetryLimits(3))
    assert [sample.episode for sample in samples] == [0, 1, 2]
    assert [request.n for request in policy.asked] == [3, 1, 1]
    assert len(set(policy.seeds)) == 3
    assert all(env.closed for env in made)
    assert len(made) == 5


async def test_a_group_asks_once_and_converses_with_the_clients_of_its_episodes() -> None:
    class Whole(Agent):
        async def run_group(self, prompt: Prompt, make_env: Any, client: Any) -> Sequence[Sample]:
            await client.generate(GenerationRequest("all", prompt.input_ids, prompt.group_size, prompt.sampling))
            own = prompt.of_member(2)
            episode = client.episode(own)
            await episode.generate(ask(own))
            return [replace(sample, episode=2) for sample in episode.samples(1.0)]

    policy = Policy()
    (sample,) = await roll_out(Whole(), policy)
    assert sample.episode == 2
    assert [request.n for request in policy.asked] == [3, 1]
    assert policy.asked[0].sampling.seed == 5


def test_a_function_of_other_arguments_is_refused_and_one_gets_what_it_names() -> None:
    async def two(prompt: Prompt, env: Environment) -> None: ...

    async def more(prompt: Prompt, env: Environment, client: ChatClient, *, tokenizer: Any, least: int) -> None: ...

    with pytest.raises(TypeError, match=r"an episode is run\(prompt, env, client\): too many positional"):
        agent_of(two, {})
    with pytest.raises(TypeError, match="least"):
        agent_of(more, {}, tokenizer=1)
    with pytest.raises(TypeError, match="most"):
        agent_of(more, {"least": 3, "most": 3}, tokenizer=1)
    assert type(agent_of(more, {"least": 3}, tokenizer=1, chat=True)).__name__ == "more"
