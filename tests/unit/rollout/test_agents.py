from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.api import (
    Agent,
    Completion,
    Environment,
    GenerationClient,
    GenerationRequest,
    GenerationResult,
    Prompt,
    Sample,
    SamplingParams,
)
from asyncrl.chat.episode_client import EpisodeClient
from asyncrl.chat.template import ChatFormat
from asyncrl.data.prompt_format import PromptFormat, make_prompt
from asyncrl.data.prompt_queue import DataOrder, prompt_seed
from asyncrl.data.tokenizers import CharTokenizer
from asyncrl.plugins.agents.retry import RetryAgent
from asyncrl.plugins.agents.sample_builder import SampleBuilder
from asyncrl.plugins.agents.single_turn import SingleTurnAgent
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset, written_out
from asyncrl.plugins.envs.retry import RetryEnv
from asyncrl.plugins.envs.single_turn import SingleTurnEnv
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.rollout.episode import run_group

TOKENIZER = CharTokenizer()
EOS = TOKENIZER.eos_token_id
RIGHT, WRONG = "1+2=3#3", "1+2=4#4"
LIMIT_S = 300.0
"""It is there to end a hang."""
Policy = Callable[[GenerationRequest], list[Completion]]


def prompt(group_size: int) -> Prompt:
    data = {"prompt": "1+2=", "answer": "3"}
    return Prompt("e0-0", 0, data, tuple(TOKENIZER.encode("1+2=")), group_size, SamplingParams(seed=5))


def completion(text: str, version: int = 0, *, cut: bool = False) -> Completion:
    ids = TOKENIZER.encode(text) + ([] if cut else [EOS])
    return Completion(ids, [-0.5] * len(ids), [version] * len(ids), "length" if cut else "stop")


class LatestFirst:
    """A client that answers with `policy`: of the requests under way at a time the latest first."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[GenerationResult]]] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._answer)
        self._waiting.append((request, loop.create_future()))
        return await self._waiting[-1][1]

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request, answer in reversed(waiting):
            answer.set_result(GenerationResult(request.request_id, tuple(self._policy(request))))


async def roll_out(
    agent: Agent,
    env: Callable[[], Environment],
    group_size: int,
    policy: Policy,
    chat: ChatFormat | None = None,
    data: dict[str, object] | None = None,
) -> Sequence[Sample]:
    made = prompt(group_size)
    made = made if data is None else replace(made, data=data)
    async with asyncio.timeout(LIMIT_S):
        samples, _ = await run_group(
            agent, env, made, LatestFirst(policy), lambda client, own: EpisodeClient(client, own, chat)
        )
    return samples


def single_turn() -> Environment:
    return SingleTurnEnv(reward=arithmetic_reward)


class QueueAgent(Agent):
    """In the form with queues: asks for each answer on its own, and takes them as they come."""

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[GenerationRequest],
        act_queue: asyncio.Queue[GenerationResult],
    ) -> Sequence[Sample]:
        for member in range(prompt.group_size):
            await obs_queue.put(GenerationRequest(str(member), prompt.input_ids, 1, prompt.sampling))
        results = [await act_queue.get() for _ in range(prompt.group_size)]
        samples = []
        for result in sorted(results, key=lambda result: result.request_id):
            builder = SampleBuilder(prompt.input_ids)
            builder.generate(result.completions[0])
            samples.append(builder.build(float(result.request_id), truncated=False))
        return samples


async def test_an_agent_with_queues_is_answered_as_the_policy_does() -> None:
    asked: list[str] = []

    def policy(request: GenerationRequest) -> list[Completion]:
        asked.append(request.request_id)
        return [completion(RIGHT)]

    samples = await roll_out(QueueAgent(), single_turn, 3, policy)
    assert [sample.reward for sample in samples] == [0.0, 1.0, 2.0]
    assert [sample.episode for sample in samples] == [0, 1, 2]
    assert asked == ["2", "1", "0"], "all were under way at the same time"


async def test_a_policy_that_fails_an_agent_with_queues_ends_its_wait() -> None:
    class Failing:
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            raise ConnectionError("no server")

    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(ConnectionError, match="no server"):
            await run_group(QueueAgent(), single_turn, prompt(2), Failing(), Any)


def test_an_agent_that_implements_neither_form_cannot_be_made() -> None:
    class Idle(Agent):
        def __init__(self, *, tokenizer: object) -> None:
            self.tokenizer = tokenizer

    with pytest.raises(TypeError, match="agent Idle implements none of run_group, run"):
        Idle(tokenizer=TOKENIZER)


def test_an_agent_with_queues_and_another_form_cannot_be_made() -> None:
    class Two(Agent):
        async def run(self, prompt: Prompt, env: Environment, client: GenerationClient) -> float:
            return 0.0

        collect_trajectory = QueueAgent.collect_trajectory

    with pytest.raises(TypeError, match="agent Two implements `run` and `collect_trajectory`"):
        Two()


async def test_the_form_that_was_overridden_last_is_the_one_that_is_called() -> None:
    class Queues(SingleTurnAgent):
        collect_trajectory = QueueAgent.collect_trajectory

    class Episodes(SingleTurnAgent):
        async def run(self, prompt: Prompt, env: Environment, client: GenerationClient) -> Sample:
            return replace(await super().run(prompt, env, client), reward=float(prompt.member))

    asked: list[str] = []

    def policy(request: GenerationRequest) -> list[Completion]:
        asked.append(request.request_id)
        return [completion(RIGHT)] * request.n

    assert (SingleTurnAgent.form(), Queues.form()) == ("run_group", "collect_trajectory")
    samples = await roll_out(Episodes(tokenizer=TOKENIZER), single_turn, 3, policy)
    assert [sample.reward for sample in samples] == [0.0, 1.0, 2.0]
    assert sorted(asked) == ["e0-0/0", "e0-0/1", "e0-0/2"]


async def test_a_single_turn_asks_once_for_the_whole_group() -> None:
    requests: list[GenerationRequest] = []

    def policy(request: GenerationRequest) -> list[Completion]:
        requests.append(request)
        return [completion(RIGHT, version=3), completion(WRONG, version=4), completion(RIGHT[:-1], cut=True)]

    samples = await roll_out(SingleTurnAgent(tokenizer=TOKENIZER), single_turn, 3, policy)
    assert [(request.n, request.input_ids) for request in requests] == [(3, prompt(3).input_ids)]
    assert [sample.reward for sample in samples] == [1.0, 0.0, 0.0]
    assert [sample.truncated for sample in samples] == [False, False, True]
    assert [int(sample.versions[-1]) for sample in samples] == [3, 4, 0]


async def test_prompt_tokens_carry_no_loss_and_answer_tokens_keep_what_the_policy_reported() -> None:
    ids = [*TOKENIZER.encode("#3"), EOS]
    answer = Completion(ids, [-0.1, -0.2, -0.3], [1, 1, 2], "stop")
    (sample,) = await roll_out(SingleTurnAgent(tokenizer=TOKENIZER), single_turn, 1, lambda _: [answer])
    assert sample.tokens.tolist() == [*TOKENIZER.encode("1+2="), *ids]
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert sample.versions.tolist() == [-1, -1, -1, -1, 1, 1, 2]
    np.testing.assert_array_equal(sample.behave_logprobs, np.array([0, 0, 0, 0, -0.1, -0.2, -0.3], np.float32))


async def test_a_retry_follows_the_feedback_and_is_worth_less() -> None:
    """Member 0 is right at once, 1 at the second try, 2 never, 3 is cut off and does not try again."""
    script = {0: [RIGHT], 1: [WRONG, RIGHT], 2: [WRONG, WRONG]}
    requests: list[GenerationRequest] = []

    def policy(request: GenerationRequest) -> list[Completion]:
        requests.append(request)
        turn, member = (int(part) for part in request.request_id.split("/")[1:])
        return [completion(WRONG, cut=True) if member == 3 else completion(script[member][turn], version=turn)]

    def env() -> Environment:
        return RetryEnv(reward=arithmetic_reward, feedback="{prompt}")

    agent = RetryAgent(tokenizer=TOKENIZER, max_turns=2, turn_discount=0.5)
    samples = await roll_out(agent, env, 4, policy)
    assert [sample.reward for sample in samples] == [1.0, 0.5, 0.0, 0.0]
    assert [sample.truncated for sample in samples] == [False, False, False, True]
    assert len({request.sampling.seed for request in requests}) == len(requests) == 6
    question, wrong, right = (TOKENIZER.encode(text) for text in ("1+2=", WRONG, RIGHT))
    assert samples[1].tokens.tolist() == [*question, *wrong, EOS, *question, *right, EOS]
    assert samples[1].loss_mask.tolist() == [0] * 4 + [1] * 8 + [0] * 4 + [1] * 8
    assert samples[1].versions.tolist() == [-1] * 4 + [0] * 8 + [-1] * 4 + [1] * 8
    assert len(samples[2].tokens) == len(samples[1].tokens), "no feedback after the last try"


async def test_feedback_repeats_the_question_of_a_prompt_in_messages() -> None:
    env = RetryEnv(reward=lambda data, text: 0.0)
    parts = [{"type": "image"}, {"type": "text", "text": "What is {this}?"}]
    for content, message in (("2+2?", "2+2?"), (parts, "What is {this}?")):
        turns = [{"role": "system", "content": "Answer."}, {"role": "user", "content": content}]
        assert (await env.reset(options={"data": {"prompt": turns}}))[0] == message
        assert (await env.step("4"))[0] == f"\nThat is not right. Try again.\n{message}\n"


async def test_the_environment_scores_with_the_reward_function_of_the_row() -> None:
    env = SingleTurnEnv(reward=lambda data, text: float(data["prompt"] == text))
    observation, _ = await env.reset(options={"data": {"prompt": "hello"}})
    assert observation == "hello"
    assert (await env.step("hello"))[1:4] == (1.0, True, False)
    assert (await env.step("other"))[1] == 0.0


async def test_a_step_before_reset_and_a_reset_without_row_are_errors() -> None:
    env = SingleTurnEnv(reward=arithmetic_reward)
    with pytest.raises(RuntimeError, match="before reset"):
        await env.step("1")
    with pytest.raises(ValueError, match="data"):
        await env.reset()


def test_a_completion_whose_arrays_differ_in_length_is_refused() -> None:
    builder = SampleBuilder([1, 2])
    builder.generate(Completion([3, 4], [-0.1], [0, 0], "stop"))
    with pytest.raises(ValueError, match="behave_logprobs"):
        builder.build(1.0, truncated=False)


def routing_of(*tokens: int) -> np.ndarray:
    """One layer's expert by token, as an engine tells it of a request's tokens and its own but the last."""
    return np.array(tokens, np.uint8)[:, None, None]


def test_a_token_keeps_the_experts_of_the_turn_that_it_was_first_computed_for() -> None:
    builder = SampleBuilder([1, 2])
    builder.generate(Completion([3, 4], [-0.1, -0.1], [0, 0], "stop", routing_of(11, 12, 13)))
    builder.observe([5])
    builder.generate(Completion([6], [-0.1], [1], "stop", routing_of(21, 22, 23, 24, 25)))
    builder.observe([7])
    sample = builder.build(1.0, truncated=False)
    assert sample.routing is not None
    assert sample.routing[:, 0, 0].tolist() == [11, 12, 13, 24, 25, 255, 255]


def test_experts_of_another_request_than_the_builder_s_are_refused() -> None:
    with pytest.raises(ValueError, match="tells the experts of 4 tokens, and 2 come before its 2"):
        SampleBuilder([1, 2]).generate(Completion([3, 4], [0.0, 0.0], [0, 0], "stop", routing_of(1, 2, 3, 4)))


def test_without_experts_a_sample_has_none() -> None:
    builder = SampleBuilder([1, 2])
    builder.generate(Completion([3], [-0.1], [0], "stop"))
    assert builder.build(1.0, truncated=False).routing is None


@pytest.mark.parametrize("logprob", [None, float("nan"), float("-inf")])
def test_a_log_probability_that_is_no_finite_number_is_refused(logprob: float | None) -> None:
    builder = SampleBuilder([1, 2])
    builder.generate(Completion([3, 4], [-0.1, logprob], [0, 0], "stop"))  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"behave_logprobs\[3\] is (nan|-inf)"):
        builder.build(1.0, truncated=False)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_reward_that_is_no_finite_number_is_refused(reward: float | None) -> None:
    with pytest.raises(ValueError, match=r"Sample.reward is (None|nan|inf)"):
        SampleBuilder([1, 2]).build(reward, truncated=False)  # type: ignore[arg-type]


def test_a_prompt_carries_its_own_seed_and_the_end_token() -> None:
    dataset = ArithmeticDataset(num_rows=20)
    ref = DataOrder(20, seed=7).ref(1)
    sampling = SamplingParams(max_new_tokens=9)
    made = make_prompt(ref, dataset, PromptFormat(TOKENIZER, None), group_size=4, sampling=sampling, run_seed=7)
    assert (made.prompt_id, made.order, made.group_size) == (ref.prompt_id, 1, 4)
    assert made.sampling == SamplingParams(max_new_tokens=9, stop_token_ids=(EOS,), seed=prompt_seed(7, 1))
    assert TOKENIZER.decode(made.input_ids) == dataset.row(ref.row)["prompt"]


def test_an_empty_prompt_is_refused() -> None:
    class Empty:
        def __len__(self) -> int:
            return 1

        def row(self, index: int) -> dict[str, str]:
            return {"prompt": ""}

    with pytest.raises(ValueError, match="prompt is empty"):
        make_prompt(
            DataOrder(1, 0).ref(0),
            Empty(),
            PromptFormat(TOKENIZER, None),
            group_size=1,
            sampling=SamplingParams(),
            run_seed=0,
        )


async def test_a_right_worked_answer_earns_one_and_a_careless_one_nothing() -> None:
    env = SingleTurnEnv(reward=arithmetic_reward)
    row = ArithmeticDataset().row(2)
    await env.reset(options={"data": row})
    numbers = ArithmeticDataset().numbers(2)
    assert (await env.step(written_out(numbers)))[1] == 1.0
    assert (await env.step(written_out([*numbers, 1])))[1] == 0.0
