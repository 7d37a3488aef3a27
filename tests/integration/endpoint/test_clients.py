"""The real clients of OpenAI and Anthropic understand every answer; and would not, were any needed field missing."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from asyncrl.api.chat import ChatFinish
from asyncrl.inference.openai import api_call
from asyncrl.inference.openai.endpoint import Session

QUESTION: Any = [{"role": "user", "content": "2+2?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}} for name in ("f", "g")
]
FLAT: Any = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
ANTHROPICS: Any = [{"name": name, "input_schema": SCHEMA} for name in ("f", "g")]
CALLS = [("f", '{"a":2}'), ("g", '{"a":2}')]


class Answer(BaseModel):
    answer: int


class Clients:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.openai = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=session.root_url, api_key=session.api_key, max_retries=0)


@pytest_asyncio.fixture
async def clients(session: Session) -> AsyncIterator[Clients]:
    made = Clients(session)
    async with made.openai, made.anthropic:
        yield made


async def chat(at: Clients) -> None:
    answer = await at.openai.chat.completions.create(
        model="m", messages=QUESTION, logprobs=True, extra_body={"return_token_ids": True}
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "The answer is 4."
    assert choice.finish_reason == "stop"
    assert choice.index == 0
    assert answer.model == "m"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (1, 4, 5)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [(each.token, each.logprob) for each in choice.logprobs.content][:2] == [
        ("token_id:11", -0.1),
        ("token_id:12", -0.2),
    ]
    assert answer.model_extra == {"prompt_token_ids": [0]}
    assert choice.model_extra == {"token_ids": [11, 12, 13, 14]}


async def chat_tools(at: Clients) -> None:
    answer = await at.openai.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    calls: Any = message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
    assert [call.type for call in calls] == ["function", "function"]
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in calls]
    assert {each["tool_call_id"] for each in results} == {"call0", "call1"}
    again: Any = [*QUESTION, message.model_dump(exclude_none=True), *results]
    answer = await at.openai.chat.completions.create(model="m", messages=again, tools=TOOLS)
    assert answer.choices[0].message.content == "The answer is 4."


async def chat_stream(at: Clients) -> None:
    options: Any = {"include_usage": True}
    async with at.openai.chat.completions.stream(
        model="m", messages=QUESTION, logprobs=True, stream_options=options
    ) as stream:
        pieces = [event.delta async for event in stream if event.type == "content.delta"]
        answer = await stream.get_final_completion()
    assert pieces == ["", "The", " answer", " is", " 4."]
    assert answer.choices[0].message.content == "The answer is 4."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 5
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or ()) == 4


async def chat_stream_tools(at: Clients) -> None:
    async with at.openai.chat.completions.stream(model="m", messages=QUESTION, tools=TOOLS) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    calls: Any = answer.choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
    assert [call.id for call in calls] == ["call0", "call1"]
    assert answer.choices[0].finish_reason == "tool_calls"


async def chat_many(at: Clients) -> None:
    answer = await at.openai.chat.completions.create(
        model="m", messages=QUESTION, n=3, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [(choice.model_extra or {})["token_ids"][0] for choice in answer.choices] == [11, 12, 13]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1, "the prompt counts once"


async def chat_many_streamed(at: Clients) -> None:
    stream = await at.openai.chat.completions.create(model="m", messages=QUESTION, n=2, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["The answer is 4."] * 2


async def chat_parse(at: Clients) -> None:
    policy: Any = at.session.client
    policy.answer = '{"answer": 4}'
    answer = await at.openai.chat.completions.parse(model="m", messages=QUESTION, response_format=Answer)
    assert answer.choices[0].message.parsed == Answer(answer=4)


async def respond(at: Clients) -> None:
    answer = await at.openai.responses.create(
        model="m", input="2+2?", instructions="be brief", include=["message.output_text.logprobs"]
    )
    assert answer.output_text == "The answer is 4."
    assert answer.status == "completed"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (2, 4, 6)
    assert answer.usage.input_tokens_details.cached_tokens == 1
    item: Any = answer.output[0]
    assert [each.token for each in item.content[0].logprobs] == [
        "token_id:11",
        "token_id:12",
        "token_id:13",
        "token_id:14",
    ]
    policy: Any = at.session.client
    assert policy.asked[-1]["messages"][0] == {"role": "system", "content": "be brief"}


async def respond_tools(at: Clients) -> None:
    first = await at.openai.responses.create(model="m", input=QUESTION, tools=FLAT)
    calls: Any = first.output
    assert [(call.type, call.name, call.arguments) for call in calls] == [("function_call", *each) for each in CALLS]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "4"} for call in calls]
    whole: Any = [*QUESTION, *[call.model_dump(exclude_none=True) for call in calls], *results]
    policy: Any = at.session.client
    for second in (
        await at.openai.responses.create(model="m", input=whole, tools=FLAT),
        await at.openai.responses.create(model="m", input=results, tools=FLAT, previous_response_id=first.id),
    ):
        assert second.output_text == "The answer is 4."
        turns = policy.asked[-1]["messages"]
        assert [message["role"] for message in turns] == ["user", "assistant", "tool", "tool"]
        assert [call["id"] for call in turns[1]["tool_calls"]] == ["call0", "call1"]
        assert [message["tool_call_id"] for message in turns[2:]] == ["call0", "call1"]


async def respond_stream(at: Clients) -> None:
    async with at.openai.responses.stream(model="m", input="2+2?") as stream:
        pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        answer = await stream.get_final_response()
    assert pieces == ["The", " answer", " is", " 4."]
    assert answer.output_text == "The answer is 4."


async def respond_stream_tools(at: Clients) -> None:
    async with at.openai.responses.stream(model="m", input="2+2?", tools=FLAT) as stream:
        pieces = [event.delta async for event in stream if event.type == "response.function_call_arguments.delta"]
        answer = await stream.get_final_response()
    calls: Any = answer.output
    assert "".join(pieces) == '{"a":2}{"a":2}'
    assert [(call.name, call.arguments) for call in calls] == CALLS
    assert [call.call_id for call in calls] == ["call0", "call1"]


async def respond_parse(at: Clients) -> None:
    policy: Any = at.session.client
    policy.answer = '{"answer": 4}'
    answer = await at.openai.responses.parse(model="m", input="2+2?", text_format=Answer)
    assert answer.output_parsed == Answer(answer=4)


async def message(at: Clients) -> None:
    answer = await at.anthropic.messages.create(
        model="m", max_tokens=5, messages=QUESTION, system="be brief", stop_sequences=["!"]
    )
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == "The answer is 4."
    assert (answer.role, answer.stop_reason, answer.model) == ("assistant", "end_turn", "m")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (2, 4)
    policy: Any = at.session.client
    assert policy.asked[-1]["messages"][0] == {"role": "system", "content": "be brief"}
    assert (policy.asked[-1]["sampling"].stop, policy.asked[-1]["sampling"].max_new_tokens) == (("!",), 5)


async def message_tools(at: Clients) -> None:
    first = await at.anthropic.messages.create(model="m", max_tokens=5, messages=QUESTION, tools=ANTHROPICS)
    blocks: Any = first.content
    assert [(block.type, block.name, block.input) for block in blocks] == [
        ("tool_use", "f", {"a": 2}),
        ("tool_use", "g", {"a": 2}),
    ]
    assert first.stop_reason == "tool_use"
    results: Any = [{"type": "tool_result", "tool_use_id": block.id, "content": "4"} for block in blocks]
    again: Any = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "so?"}]},
    ]
    second: Any = await at.anthropic.messages.create(model="m", max_tokens=5, messages=again, tools=ANTHROPICS)
    assert second.content[0].text == "The answer is 4."
    policy: Any = at.session.client
    turns = policy.asked[-1]["messages"]
    assert [message["role"] for message in turns] == ["user", "assistant", "tool", "tool", "user"]
    assert [message.get("tool_call_id") for message in turns[2:4]] == ["call0", "call1"]


async def message_stream(at: Clients) -> None:
    async with at.anthropic.messages.stream(model="m", max_tokens=5, messages=QUESTION) as stream:
        pieces = [piece async for piece in stream.text_stream]
        answer = await stream.get_final_message()
    assert pieces == ["The", " answer", " is", " 4."]
    assert answer.stop_reason == "end_turn"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (1, 4)


async def message_stream_tools(at: Clients) -> None:
    async with at.anthropic.messages.stream(model="m", max_tokens=5, messages=QUESTION, tools=ANTHROPICS) as stream:
        answer = await stream.get_final_message()
    blocks: Any = answer.content
    assert [(block.id, block.name, block.input) for block in blocks] == [
        ("call0", "f", {"a": 2}),
        ("call1", "g", {"a": 2}),
    ]
    assert answer.stop_reason == "tool_use"


async def message_count(at: Clients) -> None:
    counted = await at.anthropic.messages.count_tokens(model="m", messages=QUESTION, system="be brief")
    assert counted.input_tokens == 2


async def models(at: Clients) -> None:
    assert [model.id async for model in at.openai.models.list()] == ["policy"]
    assert (await at.openai.models.retrieve("policy")).id == "policy"
    assert [model.display_name async for model in at.anthropic.models.list()] == ["policy"]


SCENARIOS: dict[str, Callable[[Clients], Awaitable[None]]] = {
    scenario.__name__: scenario
    for scenario in (
        *(chat, chat_tools, chat_stream, chat_stream_tools, chat_many, chat_many_streamed, chat_parse),
        *(respond, respond_tools, respond_stream, respond_stream_tools, respond_parse),
        *(message, message_tools, message_stream, message_stream_tools, message_count, models),
    )
}


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_the_real_client_understands(scenario: str, clients: Clients) -> None:
    await SCENARIOS[scenario](clients)
    assert clients.session.calls.failure is None


CHUNK, EVENT = "chat.completion.chunk", "response"
NEEDED = {
    "chat": """choices choices.*.message choices.*.message.content choices.*.message.role choices.*.finish_reason
        choices.*.index choices.*.logprobs.content choices.*.logprobs.content.*.logprob
        choices.*.logprobs.content.*.token choices.*.token_ids prompt_token_ids model usage usage.prompt_tokens
        usage.completion_tokens usage.total_tokens""",
    "chat_tools": """choices.*.message.tool_calls choices.*.message.tool_calls.*.id
        choices.*.message.tool_calls.*.type choices.*.message.tool_calls.*.function.name
        choices.*.message.tool_calls.*.function.arguments""",
    "chat_stream": """choices choices.*.delta choices.*.delta.content choices.*.index choices.*.logprobs.content
        choices.*.finish_reason object usage""",
    "chat_stream_tools": """choices.*.delta.tool_calls choices.*.delta.tool_calls.*.index
        choices.*.delta.tool_calls.*.id choices.*.delta.tool_calls.*.function.name
        choices.*.delta.tool_calls.*.function.arguments""",
    "respond": "output output.*.type output.*.content output.*.content.*.text output.*.content.*.type status usage",
    "respond_tools": "id output.*.call_id output.*.name output.*.arguments",
    "respond_stream": """type response content_index item.content part delta
        item part.text""",
    "respond_stream_tools": "delta item.arguments response.output.*.call_id response.output.*.name",
    "message": """content content.*.type content.*.text role stop_reason model usage usage.input_tokens
        usage.output_tokens""",
    "message_tools": "content.*.id content.*.name content.*.input",
    "message_stream": """type message message.usage message.content index content_block delta
        delta.type delta.text delta.stop_reason usage usage.output_tokens message.usage.input_tokens""",
    "message_stream_tools": "content_block.id content_block.name delta.partial_json",
    "message_count": "input_tokens",
    "models": "data data.*.id data.*.display_name",
}
"""Paths whose removal the client notices, or the agent that reads them does."""


def without(value: Any, path: list[str]) -> None:
    """Remove what `path` names from `value`."""
    if isinstance(value, list) and path[0] == "*":
        for each in value:
            without(each, path[1:])
    elif isinstance(value, dict) and path[0] in value:
        if len(path) == 1:
            del value[path[0]]
        else:
            without(value[path[0]], path[1:])


@pytest.mark.parametrize("scenario", NEEDED)
async def test_each_needed_field_is_missed_where_it_is_removed(
    scenario: str, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = api_call.encoded
    for path in NEEDED[scenario].split():

        def mutilated(value: Any, path: str = path) -> bytes:
            value = copy.deepcopy(value)
            without(value, path.split("."))
            return encoded(value)

        monkeypatch.setattr(api_call, "encoded", mutilated)
        assert await stumbles(scenario, clients), f"{path} is not missed"


EVENTS = {
    "respond_stream": "response.created response.output_item.added response.content_part.added response.completed",
    "respond_stream_tools": "response.output_item.added response.completed",
    "message_stream": "message_start content_block_start content_block_delta message_delta",
    "message_stream_tools": "message_start content_block_start content_block_delta message_delta",
}


@pytest.mark.parametrize("scenario", EVENTS)
async def test_each_needed_event_is_missed_where_it_is_left_out(
    scenario: str, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = api_call.frame
    for kind in EVENTS[scenario].split():

        def without_it(event: Any, name: str | None = None, kind: str = kind) -> bytes:
            return b"" if event["type"] == kind else frame(event, name)

        for module in ("responses", "anthropic"):
            monkeypatch.setattr(f"asyncrl.inference.openai.{module}.frame", without_it)
        assert await stumbles(scenario, clients), f"{kind} is not missed"


async def stumbles(scenario: str, clients: Clients) -> bool:
    """True if the client, or the reader of its result, notices that something is wrong; each in its own way."""
    try:
        await SCENARIOS[scenario](clients)
    except Exception:
        return True
    return False


async def test_an_answer_that_was_cut_off_says_so_in_each_api(clients: Clients) -> None:
    policy: Any = clients.session.client
    policy.finish = ChatFinish.length
    cut = await clients.openai.chat.completions.create(model="m", messages=QUESTION)
    assert cut.choices[0].finish_reason == "length"
    response = await clients.openai.responses.create(model="m", input="2+2?")
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    streamed = await clients.openai.responses.create(model="m", input="2+2?", stream=True)
    assert [event.type async for event in streamed][-1] == "response.incomplete"
    assert (
        await clients.anthropic.messages.create(model="m", max_tokens=5, messages=QUESTION)
    ).stop_reason == "max_tokens"


async def test_an_answer_without_text_is_empty_text_where_nothing_is_called(clients: Clients) -> None:
    policy: Any = clients.session.client
    policy.answer = ""
    assert (await clients.openai.chat.completions.create(model="m", messages=QUESTION)).choices[0].message.content == ""
    assert (await clients.openai.responses.create(model="m", input="2+2?")).output_text == ""
    block: Any = (await clients.anthropic.messages.create(model="m", max_tokens=5, messages=QUESTION)).content[0]
    assert block.text == ""


async def test_what_the_policy_thought_is_told_apart(clients: Clients) -> None:
    policy: Any = clients.session.client
    policy.reasoning = "two and two"
    choice = (await clients.openai.chat.completions.create(model="m", messages=QUESTION)).choices[0]
    assert (choice.message.model_extra or {})["reasoning_content"] == "two and two"
    response: Any = await clients.openai.responses.create(model="m", input="2+2?")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "two and two"
    async with clients.openai.responses.stream(model="m", input="2+2?") as stream:
        assert (await stream.get_final_response()).output_text == "The answer is 4."
    turns: Any = [*QUESTION, *(item.model_dump(exclude_none=True) for item in response.output)]
    await clients.openai.responses.create(model="m", input=[*turns, *QUESTION])
    assert policy.asked[-1]["messages"][1] == {
        "role": "assistant",
        "content": "The answer is 4.",
        "reasoning_content": "two and two",
    }
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    async with clients.anthropic.messages.stream(
        model="m", max_tokens=2000, messages=QUESTION, thinking=thinking
    ) as events:
        blocks: Any = (await events.get_final_message()).content
    assert [(block.type, getattr(block, "thinking", None)) for block in blocks] == [
        ("thinking", "two and two"),
        ("text", None),
    ]


def test_synchronous_clients_understand_as_well(endpoint_in_thread: Any) -> None:
    session = endpoint_in_thread
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    assert client.chat.completions.create(model="m", messages=QUESTION).choices[0].message.content == "The answer is 4."
    assert client.responses.create(model="m", input="2+2?").output_text == "The answer is 4."
    with client.chat.completions.stream(model="m", messages=QUESTION, tools=TOOLS) as stream:
        calls: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
    with client.responses.stream(model="m", input="2+2?") as events:
        assert events.get_final_response().output_text == "The answer is 4."
    other = anthropic.Anthropic(base_url=session.root_url, api_key=session.api_key, max_retries=0)
    with other.messages.stream(model="m", max_tokens=5, messages=QUESTION) as texts:
        assert texts.get_final_text() == "The answer is 4."
    # a client that was given the base URL of OpenAI's
    third = anthropic.Anthropic(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    block: Any = third.messages.create(model="m", max_tokens=5, messages=QUESTION).content[0]
    assert block.text == "The answer is 4."
