"""The tool agent: the tokens of a conversation with calls, its reward, and its limits; with the demo's tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncrl.api import (
    Completion,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Prompt,
    SamplingParams,
    Tool,
    ToolResult,
)
from asyncrl.chat.episode_client import EpisodeClient
from asyncrl.chat.parsers import parser, readers
from asyncrl.chat.template import ChatFormat
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import load_tokenizer, special_tokens
from asyncrl.plugins.agents.tool_agent import ToolAgent
from asyncrl.plugins.datasets.tool_use import CalculatorDemonstrations, answered, call_text, conversation, value_of
from asyncrl.plugins.envs.single_turn import SingleTurnEnv
from asyncrl.plugins.rewards.text import numeric_match
from asyncrl.plugins.settings import ToolConfig
from asyncrl.plugins.tools.toolbox import HostedTool, Toolbox
from asyncrl.rollout.user_code.tools import RunTools
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner

FOLDER = Path(__file__).resolve().parents[3] / "experiments" / "recipes" / "tool_calculator"
SOURCE = (FOLDER / "chat_template.jinja").read_text()
TOKENIZER = load_tokenizer(FOLDER)
FORMAT = PromptFormat(TOKENIZER, ChatTemplate(SOURCE, special_tokens(FOLDER)))
CHAT = ChatFormat(FORMAT, parser(readers(FORMAT.chat)[0]))
END = "<|im_end|>"


class Script:
    """A policy that says what it is given, one text after the other."""

    def __init__(self, *texts: str, finish: FinishReason = FinishReason.stop) -> None:
        self._texts: Iterator[str] = iter(texts)
        self._finish = finish
        self.contexts: list[str] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.contexts.append(TOKENIZER.decode_all(request.input_ids))
        ids = TOKENIZER.encode(next(self._texts))
        completion = Completion(ids, [-0.5] * len(ids), [3] * len(ids), self._finish)
        return GenerationResult(request.request_id, (completion,))


@pytest.fixture
async def tools():
    async with UserCodeRunner(ExperimentConfig().rollout.user_code) as runner:
        yield RunTools([ToolConfig(path="asyncrl.plugins.tools.calculator:calculator")], (), runner).toolbox


def _prompt(question: str, answer: str) -> Prompt:
    data = {"prompt": question, "answer": answer}
    sampling = SamplingParams(max_new_tokens=64, seed=1, stop_token_ids=(TOKENIZER.eos_token_id,))
    return Prompt("p", 0, data, tuple(FORMAT.encode(data)), 1, sampling)


async def _run(policy: Script, tools: Toolbox, expression: str = "347*29", **args):
    prompt = _prompt(f"What is {expression}?", str(value_of(expression)))
    agent = ToolAgent(tokenizer=TOKENIZER, tools=tools, **args)
    return await agent.run(prompt, SingleTurnEnv(reward=numeric_match), EpisodeClient(policy, prompt, CHAT))


def _generated(sample) -> str:
    return TOKENIZER.decode_all(sample.tokens[sample.loss_mask.astype(bool)].tolist())


async def test_a_call_is_answered_and_the_conversation_goes_on_by_token_ids(tools):
    policy = Script(call_text("347*29") + END, "It is 10063." + END)
    (sample,) = await _run(policy, tools)
    asked = conversation("347*29")
    then = answered(asked, call_text("347*29"), "10063")
    assert policy.contexts == [asked, then]
    assert TOKENIZER.decode_all(sample.tokens.tolist()) == then + "It is 10063." + END
    assert _generated(sample) == call_text("347*29") + END + "It is 10063." + END
    assert sample.reward == 1.0
    assert sample.reward_parts == {"answer": 1.0}
    assert sample.metrics == {"turns": 2.0, "tool_calls": 1.0, "malformed_calls": 0.0}
    assert not sample.truncated
    assert set(sample.versions[sample.loss_mask == 1]) == {3}
    assert np.all(sample.behave_logprobs[sample.loss_mask == 0] == 0)


async def test_an_answer_without_a_call_ends_it(tools):
    (sample,) = await _run(Script("It is 9999." + END), tools)
    assert sample.reward == 0.0
    assert _generated(sample) == "It is 9999." + END


async def test_a_malformed_call_is_an_answer_that_costs_its_penalty(tools):
    malformed = call_text("347*29").replace("}}", "}")
    (sample,) = await _run(Script(malformed + END), tools, malformed_penalty=0.25)
    assert sample.reward_parts == {"answer": 0.0, "malformed_calls": -0.25}
    assert sample.reward == -0.25
    assert sample.metrics["malformed_calls"] == 1.0


async def test_a_tool_that_fails_is_read_by_the_model(tools):
    policy = Script(call_text("347/0") + END, "It is 10063." + END)
    (sample,) = await _run(policy, tools)
    assert "Error: raised ValueError: division by zero" in policy.contexts[1]
    assert sample.reward == 1.0


async def test_the_last_turns_calls_are_not_followed(tools):
    (sample,) = await _run(Script(call_text("1*1") + END, call_text("2*2") + END), tools, max_turns=2)
    assert sample.truncated
    assert sample.reward == 0.0
    assert sample.metrics["turns"] == 2.0


async def test_an_answer_that_is_cut_off_ends_it_and_its_calls_are_not_run(tools):
    (sample,) = await _run(Script(call_text("347*29"), finish=FinishReason.length), tools)
    assert sample.truncated
    assert sample.metrics["tool_calls"] == 0.0


async def test_the_calls_of_a_turn_run_at_the_same_time_and_no_more_than_are_allowed():
    class Meeting(Tool):
        """Returns once two are there; gives a reward."""

        name = "calculator"

        def __init__(self) -> None:
            self.there, self.met = 0, asyncio.Event()

        def schema(self):
            parameters = {"type": "object", "properties": {"expression": {"type": "string"}}}
            return {"type": "function", "function": {"name": self.name, "description": "", "parameters": parameters}}

        async def execute(self, instance_id, arguments):
            self.there += 1
            if self.there == 2:
                self.met.set()
            await asyncio.wait_for(self.met.wait(), 120)
            return ToolResult(arguments["expression"], reward=0.25)

        async def calc_reward(self, instance_id):
            return 1.0

    async def host(method, *args, **kwargs):
        return await method(*args, **kwargs)

    toolbox = Toolbox([HostedTool(Meeting(), "tool meeting", host, 100)])
    calls = "\n".join(call_text(str(number)) for number in range(3))
    policy = Script(calls + END, "It is 10063." + END)
    (sample,) = await _run(policy, toolbox, max_calls=2)
    replies = policy.contexts[1].split("<tool_response>\n")[1:]
    assert [reply.partition("\n")[0] for reply in replies[:2]] == ["0", "1"]
    assert replies[2].startswith("Error: not run, 2 calls are the most")
    assert sample.reward_parts == {"answer": 1.0, "tool/calculator": 1.5}
    assert sample.reward == 2.5


@pytest.mark.parametrize("ordered", [False, True])
async def test_the_calls_of_a_turn_run_in_their_order_where_that_is_set(ordered):
    class Notes(Tool):
        """Writing takes longer than reading."""

        name = "calculator"

        def __init__(self) -> None:
            self.kept, self.read = "", asyncio.Event()

        def schema(self):
            parameters = {"type": "object", "properties": {"expression": {"type": "string"}}}
            return {"type": "function", "function": {"name": self.name, "description": "", "parameters": parameters}}

        async def execute(self, instance_id, arguments):
            if arguments["expression"] == "read":
                self.read.set()
                return ToolResult(f"read: {self.kept}")
            if not ordered:
                await self.read.wait()
            self.kept = "new"
            return ToolResult("written")

    async def host(method, *args, **kwargs):
        return await method(*args, **kwargs)

    policy = Script(call_text("write") + call_text("read") + END, "It is 10063." + END)
    await _run(policy, Toolbox([HostedTool(Notes(), "tool notes", host, 100)]), ordered_calls=ordered)
    assert ("read: new" in policy.contexts[1]) is ordered


def test_the_demos_demonstrations_are_what_its_template_renders():
    schema = {"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}}}
    user = {"role": "user", "content": "What is 12*34?"}
    call = {"name": "calculator", "arguments": {"expression": "12*34"}}
    message = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": call}]}
    reported = {"role": "tool", "tool_call_id": "a", "content": "408"}

    def rendered(*messages):
        return TOKENIZER.decode_all(CHAT.begin(messages, [schema]).ids)

    assert rendered(user) == conversation("12*34")
    assert rendered(user, message, reported) == answered(conversation("12*34"), call_text("12*34"), "408")
    assert CHAT.findings.refused == {}


def test_the_demos_demonstrations_have_the_shares_that_are_set():
    def answers(**shares):
        data = CalculatorDemonstrations(num_rows=400, **shares)
        return [data.demonstration(data.row(index)) for index in range(400)]

    assert all("<tool_call>" in answer for answer in answers(after_call=0.0))
    assert not any("<tool_call>" in answer for answer in answers(after_call=0.0, in_head=1.0))
    read = [parser("hermes").parse(answer) for answer in answers(after_call=0.0, miswritten=1.0)]
    assert 100 < sum(parsed.malformed for parsed in read) < 300


def test_no_problem_of_the_demo_is_in_both_splits_and_values_are_right():
    train, held_out = (CalculatorDemonstrations(split=split, num_rows=300) for split in ("train", "held_out"))
    expressions = [{each.expression(index) for index in range(300)} for each in (train, held_out)]
    assert not expressions[0] & expressions[1]
    for expression in expressions[0]:
        assert value_of(expression) == eval(expression)
