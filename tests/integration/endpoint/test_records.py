"""The endpoint records what a native agent would have recorded, token by token."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import pytest_asyncio

from asyncrl.api import (
    Completion,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Prompt,
    Sample,
    SamplingParams,
)
from asyncrl.chat.conversation import ChatLimits
from asyncrl.chat.episode_client import ChatPolicy, EpisodeClient
from asyncrl.chat.settings import DriftCheck
from asyncrl.chat.template import ChatFormat
from asyncrl.data.stop_strings import kept_tokens
from asyncrl.inference.openai.endpoint import Endpoint, Session
from asyncrl.rollout.user_code.conversations import ServedEpisodeClient

FEEDBACK = ("Are you sure? 2 + 2 is more than that.", "Really?  Say it\n\n again: \u4f60\u597d.")
TOOLS: Any = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}]


@dataclass
class Policy:
    """Random tokens by seed and context, no text that a tokenizer would cut so; like a server, to both of two askers
    the same."""

    end_id: int
    vocabulary: int

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return GenerationResult(request.request_id, tuple(self._answer(request, i) for i in range(request.n)))

    def _answer(self, request: GenerationRequest, index: int) -> Completion:
        context = hashlib.blake2b(repr(request.input_ids).encode(), digest_size=8).hexdigest()
        chance = random.Random(f"{request.sampling.seed}/{index}/{context}")
        ids = [chance.randrange(self.vocabulary) for _ in range(chance.randrange(1, 12))]
        ids = [token for token in ids if token != self.end_id]
        cut = chance.random() < 0.2
        ids = [*ids, *([] if cut else [self.end_id])][: request.sampling.max_new_tokens]
        finish = FinishReason.stop if ids and ids[-1] == self.end_id else FinishReason.length
        ids = ids or [0]
        return Completion(ids, [-chance.random() for _ in ids], [chance.randrange(5) for _ in ids], finish)


@dataclass
class World:
    """Episodes of one policy, native and through the endpoint."""

    chat: ChatFormat
    endpoint: Endpoint
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    def client(self, number: int, rules: ChatPolicy | None = None) -> EpisodeClient:
        assert self.chat.findings.end_id is not None
        sampling = SamplingParams(max_new_tokens=10, seed=number)
        prompt = Prompt(f"p{number}", number, {"prompt": f"{number} + 2 = ?"}, (), 4, sampling)
        prompt = replace(prompt, input_ids=tuple(self.chat.begin([question(number)]).ids), member=number % 4)
        return EpisodeClient(Policy(self.chat.findings.end_id, 500), prompt, self.chat, rules)

    async def open(self, client: EpisodeClient, number: int) -> Session:
        return await self.endpoint.open(client, SamplingParams(max_new_tokens=10, seed=number))


@pytest_asyncio.fixture
async def world(chat: ChatFormat, endpoint: Endpoint) -> AsyncIterator[World]:
    async with (
        openai.AsyncOpenAI(base_url="http://none", api_key="x", max_retries=0) as one,
        anthropic.AsyncAnthropic(base_url="http://none", api_key="x", max_retries=0) as other,
    ):
        yield World(chat, endpoint, one, other)


def question(number: int) -> Any:
    return {"role": "user", "content": f"{number} + 2 = ?"}


def assert_equal(samples: Sequence[Sample], others: Sequence[Sample]) -> None:
    assert len(samples) == len(others)
    for sample, other in zip(samples, others, strict=True):
        for name in ("tokens", "loss_mask", "behave_logprobs", "versions"):
            np.testing.assert_array_equal(getattr(sample, name), getattr(other, name))
        assert sample.truncated == other.truncated


async def native(client: EpisodeClient, number: int, tools: Any = ()) -> None:
    """Three turns as a native agent has them."""
    messages = [question(number)]
    for turn in range(3):
        reply = await client.chat(messages, tools=tools)
        messages.append(reply.message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in reply.tool_calls]
        if turn < 2 and not reply.tool_calls:
            messages.append({"role": "user", "content": FEEDBACK[turn]})


async def through_openai(at: openai.AsyncOpenAI, number: int, tools: Any = (), stream: bool = False) -> None:
    messages: Any = [question(number)]
    more = {"tools": tools} if tools else {}
    for turn in range(3):
        if stream:
            async with at.chat.completions.stream(model="m", messages=messages, **more) as events:
                async for _ in events:
                    pass
                message: Any = events.current_completion_snapshot.choices[0].message
        else:
            message = (await at.chat.completions.create(model="m", messages=messages, **more)).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        calls = message.tool_calls or ()
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls]
        if turn < 2 and not calls:
            messages.append({"role": "user", "content": FEEDBACK[turn]})


async def through_responses(at: openai.AsyncOpenAI, number: int, tools: Any = (), stored: bool = False) -> None:
    turns: Any = [question(number)]
    more: Any = {"tools": [{"type": "function", **tool["function"]} for tool in tools]} if tools else {}
    for turn in range(3):
        answer: Any = await at.responses.create(model="m", input=turns, **more)
        if stored:
            more["previous_response_id"], turns = answer.id, []
        else:
            turns += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        turns += [{"type": "function_call_output", "call_id": call.call_id, "output": "5"} for call in calls]
        if turn < 2 and not calls:
            turns.append({"role": "user", "content": FEEDBACK[turn]})


async def through_anthropic(at: anthropic.AsyncAnthropic, number: int, tools: Any = ()) -> None:
    messages: Any = [question(number)]
    more: Any = {}
    if tools:
        schema = {"type": "object", "properties": {}}
        more = {"tools": [{"name": "look", "description": "d", "input_schema": schema}]}
    for turn in range(3):
        answer: Any = await at.messages.create(model="m", max_tokens=10, messages=messages, **more)
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if calls:
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "5"} for call in calls]
            messages.append({"role": "user", "content": results})
        elif turn < 2:
            messages.append({"role": "user", "content": FEEDBACK[turn]})


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["text", "tools"])
@pytest.mark.parametrize("api", ["chat", "chat streamed", "responses", "responses stored", "messages"])
async def test_samples_are_those_of_the_native_agent(world: World, api: str, tools: Any) -> None:
    if tools and api == "messages":
        schema = {"type": "object", "properties": {}}
        tools = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": schema}}]
    called = 0
    for number in range(12):
        client, expected = world.client(number), world.client(number)
        session = await world.open(client, number)
        there = world.openai.with_options(base_url=session.base_url, api_key=session.api_key)
        elsewhere = world.anthropic.with_options(base_url=session.root_url, api_key=session.api_key)
        await native(expected, number, tools)
        if api.startswith("chat"):
            await through_openai(there, number, tools, stream=api == "chat streamed")
        elif api.startswith("responses"):
            await through_responses(there, number, tools, stored=api == "responses stored")
        else:
            await through_anthropic(elsewhere, number, tools)
        session.close()
        assert len(client.turns) == 3
        assert_equal(client.samples(1.0), expected.samples(1.0))
        called += sum(bool(turn.reply and turn.reply.tool_calls) for turn in client.turns)
    assert (called > 0) == bool(tools)


@pytest.mark.slow
async def test_episodes_of_three_turns_that_are_under_way_at_once_drift_by_no_token(world: World) -> None:
    """Of a text that is tokenised anew four of five would drift, as the test below shows."""
    limited = asyncio.Semaphore(16)

    async def episode(number: int) -> None:
        async with limited:
            client, expected = world.client(number), world.client(number)
            session = await world.open(client, number)
            await through_openai(world.openai.with_options(base_url=session.base_url, api_key=session.api_key), number)
            session.close()
        await native(expected, number)
        (sample,) = client.samples()
        assert_equal([sample], expected.samples())
        turns = [turn.completion for turn in client.turns]
        mask = sample.loss_mask.astype(bool)
        assert sample.tokens[mask].tolist() == [token for each in turns for token in each.token_ids]
        assert sample.versions[mask].tolist() == [version for each in turns for version in each.versions]
        assert client.metrics["chat/extended"] == 2, "one conversation, extended twice"

    await asyncio.gather(*(episode(number) for number in range(48)))
    assert len(world.endpoint) == 0


async def test_text_that_is_retokenised_would_have_drifted(world: World) -> None:
    """The control of the test above: its answers are such that rendering them anew gives other ids."""
    drifted = 0
    for number in range(20):
        client = world.client(number, ChatPolicy(drift=DriftCheck.tolerant))
        session = await world.open(client, number)
        await through_openai(world.openai.with_options(base_url=session.base_url, api_key=session.api_key), number)
        drifted += client.metrics.get("chat/drift_text", 0) + client.metrics.get("chat/drift_tokens", 0) > 0
    assert drifted > 15


async def test_answers_that_nobody_got_are_in_no_sample(world: World) -> None:
    client = world.client(0)
    session = await world.open(client, 0)
    there = world.openai.with_options(base_url=session.base_url, api_key=session.api_key)
    first = await there.chat.completions.create(model="m", messages=[question(0)], n=3)
    assert len(client.samples()) == 3
    for turn in client.turns[1:]:
        client.forget(turn.completion)
    assert len(client.samples()) == 1
    turns: Any = [question(0), {"role": "assistant", "content": first.choices[0].message.content}]
    await there.chat.completions.create(model="m", messages=[*turns, {"role": "user", "content": "so?"}])
    assert client.metrics["chat/extended"] == 1
    client.forget(client.turns[0].completion)
    assert len(client.turns) == 2, "what was gone on from stays"


async def test_a_conversation_at_its_limit_ends_with_length_and_then_with_an_error(world: World) -> None:
    client = world.client(0, ChatPolicy(limits=ChatLimits(max_turns=2)))
    session = await world.open(client, 0)
    there = world.openai.with_options(base_url=session.base_url, api_key=session.api_key)
    messages: Any = [question(0)]
    for finish in (None, None, "length"):
        choice = (await there.chat.completions.create(model="m", messages=messages)).choices[0]
        assert finish is None or choice.finish_reason == finish
        messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": "so?"}]
    with pytest.raises(openai.BadRequestError, match="max_turns=2") as refused:
        await there.chat.completions.create(model="m", messages=messages[:-2])
    assert refused.value.code == "context_length_exceeded"
    assert session.calls.failure is None


async def test_agents_at_one_address_are_told_apart_by_their_session_id(world: World) -> None:
    """Both ask the same, so that without it the second would be a branch of the first's conversation."""
    assert world.chat.findings.end_id is not None
    prompt = Prompt("p", 0, {"prompt": "?"}, (), 1, SamplingParams(max_new_tokens=10, seed=1))
    client = ServedEpisodeClient(
        Policy(world.chat.findings.end_id, 500), prompt, world.chat, endpoint=lambda: world.endpoint
    )
    session = await client.endpoint(apart=True)
    there = world.openai.with_options(base_url=session.base_url, api_key=session.api_key)
    for name in ("first", "second", "first"):
        await there.chat.completions.create(model="m", messages=[question(1)], extra_headers={"X-Session-ID": name})
    assert [len(client.conversation(name).samples()) for name in ("first", "second")] == [2, 1]
    assert len(client.turns) == 0
    with pytest.raises(openai.BadRequestError, match="X-Session-ID"):
        await there.chat.completions.create(
            model="m", messages=[question(1)], extra_headers={"X-Session-ID": "x" * 300}
        )
    client.close()
    assert len(world.endpoint) == 0


async def test_calls_in_token_ids_are_recorded_too(world: World) -> None:
    client = world.client(0)
    session = await world.open(client, 0)
    there = world.openai.with_options(base_url=session.base_url, api_key=session.api_key)
    tokens: Any = await there.post(
        f"{session.root_url}/tokenize", cast_to=object, body={"model": "m", "messages": [question(0)]}
    )
    assert tokens["tokens"] == world.chat.begin([question(0)]).ids
    assert tokens["count"] == len(tokens["tokens"])
    body = {"model": "m", "token_ids": tokens["tokens"], "sampling_params": {"logprobs": 1, "max_tokens": 5}}
    made: Any = await there.post(f"{session.root_url}/inference/v1/generate", cast_to=object, body=body)
    (choice,) = made["choices"]
    (sample,) = client.samples()
    mask = sample.loss_mask.astype(bool)
    assert sample.tokens[mask].tolist() == choice["token_ids"]
    assert [each["token"] for each in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    chat = {"model": "m", "messages": [question(0)], "tokens": tokens["tokens"], "return_token_ids": True}
    answer: Any = await there.post("/chat/completions/tokens", cast_to=object, body=chat)
    assert answer["prompt_token_ids"] == tokens["tokens"]
    wrong = {**chat, "tokens": [*tokens["tokens"][:-1], 7]}
    with pytest.raises(openai.BadRequestError, match=f"position {len(tokens['tokens']) - 1}"):
        await there.post("/chat/completions/tokens", cast_to=object, body=wrong)


async def test_what_a_client_stitches_together_by_tokenize_is_what_a_conversation_goes_on_with(world: World) -> None:
    """As the token client of `verifiers` does: the new messages after a stand-in, less the stand-in alone."""
    client = EpisodeClient(Says(world.chat, "no"), world.client(0)._prompt, world.chat)
    session = await world.open(client, 0)
    there = world.openai.with_options(base_url=session.base_url, api_key=session.api_key)

    async def tokenize(*messages: Any, **more: Any) -> list[int]:
        body = {"messages": messages, **more}
        reported: Any = await there.post(f"{session.root_url}/tokenize", cast_to=object, body=body)
        return list(reported["tokens"])

    first = await there.chat.completions.create(model="m", messages=[question(0)])
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    more = {"role": "user", "content": FEEDBACK[0]}
    stand_in = {"role": "assistant", "content": "x"}
    alone = await tokenize(stand_in, add_generation_prompt=False)
    assert world.chat.tokenizer.decode_all(alone) == "<|im_start|>assistant\nx<|im_end|>\n"
    bridge = (await tokenize(stand_in, more))[len(alone) - 1 :]  # its newline comes after the end of the turn
    ids = [*client.turns[0].ids, *bridge]
    assert ids == await tokenize(question(0), answer, more)
    chat = {"model": "m", "messages": [question(0), answer, more], "tokens": ids, "return_token_ids": True}
    await there.post("/chat/completions/tokens", cast_to=object, body=chat)
    assert client.metrics["chat/extended"] == 1
    with pytest.raises(openai.BadRequestError, match="messages: empty"):
        await tokenize(add_generation_prompt=False)


async def test_the_model_says_how_long_a_conversation_may_be(world: World) -> None:
    for limits, reported in ((ChatLimits(max_context=77), 77), (ChatLimits(), None)):
        session = await world.open(world.client(0, ChatPolicy(limits=limits)), 0)
        there = world.openai.with_options(base_url=session.base_url, api_key=session.api_key)
        model: Any = await there.models.retrieve("policy")
        (listed,) = (await there.models.list()).data
        assert getattr(model, "max_model_len", None) == reported
        assert listed == model


@dataclass
class Says:
    """Writes `text`, up to and with the token that completes a stop string, as all engines do."""

    chat: ChatFormat
    text: str

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        tokenizer, end_id = self.chat.tokenizer, self.chat.findings.end_id
        assert end_id is not None
        ids = [*tokenizer.encode(self.text), end_id]
        kept = kept_tokens(ids, request.sampling.stop, tokenizer.decode_all)
        ids = ids[:kept]
        completion = Completion(ids, [-0.5] * len(ids), [0] * len(ids), FinishReason.stop)
        return GenerationResult(request.request_id, (completion,))


@pytest.mark.parametrize(
    ("stops", "text", "stopped_at"),
    [(["more"], "2 + 2 is ", "more"), (["than", "more t"], "2 + 2 is ", "more t"), (["nothing"], None, None)],
)
async def test_anthropics_client_is_told_which_stop_sequence_ended_the_answer(
    world: World, stops: list[str], text: str | None, stopped_at: str | None
) -> None:
    says = "2 + 2 is more than that."
    client = EpisodeClient(Says(world.chat, says), world.client(0)._prompt, world.chat)
    session = await world.open(client, 0)
    there = world.anthropic.with_options(base_url=session.root_url, api_key=session.api_key)
    asked: Any = {"model": "m", "max_tokens": 100, "messages": [question(0)], "stop_sequences": stops}
    whole = await there.messages.create(**asked)
    async with there.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        assert answer.content[0].text == (says if text is None else text)  # type: ignore[union-attr]
        assert answer.stop_sequence == stopped_at
        assert answer.stop_reason == ("end_turn" if stopped_at is None else "stop_sequence")


async def test_tokenize_tells_the_context_that_a_conversation_really_has(world: World) -> None:
    session = await world.open(world.client(0, ChatPolicy(limits=ChatLimits(max_context=77))), 0)
    there = world.openai.with_options(base_url=session.base_url, api_key=session.api_key)
    body = {"model": "m", "messages": [question(0)]}
    found: Any = await there.post(f"{session.root_url}/tokenize", cast_to=object, body=body)
    assert found["max_model_len"] == 77
