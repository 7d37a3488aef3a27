"""What agent programs send is served, in bodies as theirs; and each of their calls is recorded as the user says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from asyncrl.api import (
    ChatFinish,
    Completion,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Prompt,
    Sample,
    SamplingParams,
)
from asyncrl.chat.conversation import ChatLimits
from asyncrl.chat.episode_client import ChatPolicy
from asyncrl.chat.settings import Repeated
from asyncrl.chat.template import ChatFormat
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.openai.endpoint import Endpoint, Session
from asyncrl.rollout.settings import ConversationConfig, OfferedTools
from asyncrl.rollout.user_code.conversations import Conversations, ServedEpisodeClient

BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=sdk-cli; cch=00000;"
CACHED = {"cache_control": {"type": "ephemeral"}}
SUB_AGENT = {"x-claude-code-agent-id": "a1b2"}
THINKING_KEPT = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


def claude(*more: Any, **others: Any) -> dict[str, Any]:
    """A call of Claude Code's main agent, with `more` messages after the task."""
    task = [
        {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"},
        {"type": "text", "text": "Mend it.", **CACHED},
    ]
    body = {
        "model": "claude-sonnet-5[1m]",
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": BILLING.format("a1f")},
            {"type": "text", "text": "You are Claude Code.", **CACHED},
        ],
        "messages": [
            {"role": "user", "content": task},
            {"role": "system", "content": "There is the sub-agent Explore."},
            *more,
        ],
        "tools": [
            {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "context_management": THINKING_KEPT,
        "output_config": {"effort": "high"},
        "mcp_servers": [],
    }
    return body | others


def title(**others: Any) -> dict[str, Any]:
    """Claude Code's call for a title."""
    body = claude(system=[{"type": "text", "text": BILLING.format("0c3")}, {"type": "text", "text": "Write a title."}])
    return body | {"model": "claude-haiku-4-5-20251001", "tools": [], "messages": body["messages"][:1]} | others


def codex(*more: Any, **others: Any) -> dict[str, Any]:
    """A call of Codex, with `more` items after the task."""
    environment = {"type": "input_text", "text": "<environment_context><cwd>/work</cwd></environment_context>"}
    body = {
        "model": "policy",
        "instructions": "You are Codex.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"type": "message", "role": "user", "content": [environment]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Mend it."}]},
            *more,
        ],
        "tools": [
            {"type": "function", "name": "look", "description": "Looks.", "strict": False, "parameters": {}},
            {"type": "namespace", "name": "multi_agent_v1", "description": "d", "tools": []},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "client_metadata": {"x-codex-installation-id": "i"},
    }
    return body | others


def pi(*more: Any, **others: Any) -> dict[str, Any]:
    """A call of pi, over chat completions, with `more` messages after the task."""
    messages = [{"role": "system", "content": "You are pi."}, {"role": "user", "content": "Mend it."}, *more]
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
    return {
        "model": "policy",
        "messages": messages,
        "tools": [{"type": "function", "function": {**function, "strict": False}}, {"type": "web_search"}],
        "store": False,
        "max_completion_tokens": 32000,
    } | others


@dataclass
class Script:
    """Says `texts` in turn; an `a` in an answer is a call of `look` where tools are offered."""

    chat: ChatFormat
    texts: list[str]
    asked: list[str] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        tokenizer, end_id = self.chat.tokenizer, self.chat.findings.end_id
        assert end_id is not None
        self.asked.append(tokenizer.decode_all(request.input_ids))
        answers = []
        for _ in range(request.n):
            ids = [*tokenizer.encode(self.texts.pop(0)), end_id]
            answers.append(Completion(ids, [-0.5] * len(ids), [3] * len(ids), FinishReason.stop))
        return GenerationResult(request.request_id, tuple(answers))


class World:
    """An endpoint, and the episode of a scripted policy."""

    def __init__(self, chat: ChatFormat, http: aiohttp.ClientSession) -> None:
        self.chat, self._http = chat, http
        self.endpoint = Endpoint()
        self.client: ServedEpisodeClient
        self.session: Session
        self.script: Script

    async def begin(
        self,
        *texts: str,
        rules: ChatPolicy | None = None,
        conversations: Sequence[ConversationConfig] = (),
        apart: bool = False,
    ) -> None:
        await self.endpoint.close()
        self.endpoint, self.script = Endpoint(conversations=conversations), Script(self.chat, list(texts))
        prompt = Prompt("p", 0, {"prompt": "?"}, (), 1, SamplingParams(max_new_tokens=64, seed=1))
        self.client = ServedEpisodeClient(self.script, prompt, self.chat, rules, endpoint=lambda: self.endpoint)
        self.session = await self.client.endpoint(apart=apart)

    async def ask(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None, status: int = 200
    ) -> dict[str, Any]:
        own = {"Authorization": f"Bearer {self.session.api_key}", **(headers or {})}
        async with self._http.post(f"{self.session.base_url}{path}", data=json.dumps(body), headers=own) as answer:
            assert answer.status == status, await answer.text()
            found: dict[str, Any] = await answer.json()
            return found

    def said(self, samples: Sequence[Sample]) -> list[list[str]]:
        """What is trained of each sample, answer by answer."""
        texts = []
        for sample in samples:
            mask, tokens = sample.loss_mask.tolist(), sample.tokens.tolist()
            stretches: list[list[int]] = []
            for at, token in enumerate(tokens):
                if mask[at]:
                    if at == 0 or not mask[at - 1]:
                        stretches.append([])
                    stretches[-1].append(token)
            texts.append([self.chat.tokenizer.decode_all(each).removesuffix("<|im_end|>") for each in stretches])
        return texts


@pytest_asyncio.fixture
async def world(chat: ChatFormat) -> AsyncIterator[World]:
    async with aiohttp.ClientSession() as http:
        made = World(chat, http)
        yield made
        await made.endpoint.close()


def result_of(answer: Mapping[str, Any]) -> list[Any]:
    """Claude Code's next messages after an answer that calls."""
    (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "four"}], **CACHED}
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]


async def test_claude_codes_calls_are_one_conversation_whatever_its_billing_line_says(world: World) -> None:
    await world.begin("Title", "so a", "done")
    await world.ask("/messages?beta=true", title())
    called = await world.ask("/messages?beta=true", claude())
    assert called["stop_reason"] == "tool_use"
    billed = [{"type": "text", "text": f"{BILLING.format('9b0')}\n"}, *claude()["system"][1:]]
    await world.ask("/messages?beta=true", claude(*result_of(called), system=billed))
    assert world.said(world.client.samples()) == [["Title"], ["so a", "done"]]
    assert not any("billing" in prompt for prompt in world.script.asked)
    assert world.client.metrics["chat/left_out_tools"] == 2, "web_search, of two calls"
    assert world.endpoint.refused == {}


async def test_codexs_and_pis_calls_are_one_conversation_each(world: World) -> None:
    await world.begin("so a", "done")
    called = await world.ask("/responses", codex())
    (call,) = [item for item in called["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "four"}
    await world.ask("/responses", codex(*called["output"], result))
    assert world.said(world.client.samples()) == [["so a", "done"]]
    assert world.client.metrics["chat/left_out_tools"] == 4
    await world.begin("so a", "done")
    message = (await world.ask("/chat/completions", pi()))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "four"}
    await world.ask("/chat/completions", pi(message, result))
    assert world.said(world.client.samples()) == [["so a", "done"]]
    assert world.client.metrics["chat/left_out_tools"] == 2


async def test_a_root_is_looked_at_without_a_key_and_nothing_else_is(world: World) -> None:
    await world.begin()
    async with aiohttp.ClientSession() as http:
        for method, url, status in (
            ("HEAD", world.session.root_url, 200),
            ("GET", f"{world.session.root_url}/", 200),
            ("POST", world.session.root_url, 401),
            ("GET", f"{world.session.base_url}/models", 401),
            ("HEAD", world.session.root_url.replace(world.session.id, "0" * 32), 404),
        ):
            async with http.request(method, url) as answer:
                assert answer.status == status, url
                assert status != 200 or await answer.read() == b""
    assert world.endpoint.refused == {"invalid_api_key": 2, "session_not_found": 1}


async def test_a_call_that_was_asked_for_and_did_not_come_is_counted(world: World) -> None:
    await world.begin("so a", "no", "no")
    await world.ask("/chat/completions", pi(tool_choice="required"))
    await world.ask("/chat/completions", pi(tool_choice={"type": "function", "function": {"name": "look"}}))
    assert world.client.metrics["chat/unmet_tool_choices"] == 1
    await world.ask("/messages", claude(tool_choice={"type": "any", "disable_parallel_tool_use": True}))
    assert world.client.metrics["chat/unmet_tool_choices"] == 2


@pytest.mark.parametrize("api", ["chat", "responses", "messages", "generate"])
async def test_a_call_that_the_context_has_no_room_for_is_refused_in_the_apis_own_words_each_time(
    world: World, api: str
) -> None:
    """So that programs begin to compact. The conversation before it is truncated; a native agent reads `length`."""
    await world.begin("done")
    ids = world.chat.begin([{"role": "user", "content": "Mend it."}]).ids
    first: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "Mend it."}]}),
        "responses": ("/responses", {"model": "m", "input": "Mend it."}),
        "messages": (
            "/messages",
            {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Mend it."}]},
        ),
        "generate": ("/inference/v1/generate", {"token_ids": ids}),
    }
    path, body = first[api]
    most = len(ids) + 8
    await world.begin("done", rules=ChatPolicy(ChatLimits(max_context=most)))
    await world.ask(path, body)
    (turn,) = world.client.turns
    more = {"role": "user", "content": "And then? " * 9}
    if api == "generate":
        over: Any = {"token_ids": [*turn.ids, *ids]}
    elif api == "responses":
        over = {
            **body,
            "input": [{"role": "user", "content": "Mend it."}, {"role": "assistant", "content": "done"}, more],
        }
    else:
        over = {**body, "messages": [*body["messages"], {"role": "assistant", "content": "done"}, more]}
    for _ in range(2):
        error = (await world.ask(path, over, status=400))["error"]
        assert error["type"] == "invalid_request_error"
        if api == "messages":
            words, tokens = "prompt is too long: {} tokens > {} maximum", error["message"].split()[4]
            assert error["message"] == words.format(tokens, most - 1)
        else:
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith(f"This model's maximum context length is {most} tokens. However, your")
            tokens = error["message"].partition("resulted in ")[2].split()[0]
        assert int(tokens) > most
    assert world.client.metrics["chat/limit_context_length"] == 1
    (sample,) = world.client.samples()
    assert sample.truncated
    if api == "chat":
        again = await world.client.chat([{"role": "user", "content": "Mend it. " * 90}])
        assert (again.finish_reason, again.completion.token_ids) == (ChatFinish.length, [])


TITLES = ConversationConfig(model="claude-haiku-*", tools=OfferedTools.none, trained=False)
PLAIN = ConversationConfig(model="claude-sonnet-5[1m]", tools=OfferedTools.none, group="plain")
SUB_AGENTS = ConversationConfig(header="X-Claude-Code-Agent-Id", group="sub")


@pytest.mark.parametrize("apart", [False, True])
async def test_side_conversations_are_trained_as_the_first_rule_says_that_they_meet(world: World, apart: bool) -> None:
    """Also those of an agent that has a conversation of its own at the address; each agent's are its own."""
    await world.begin("Title", "so a", "found", "done", "why", conversations=[TITLES, PLAIN, SUB_AGENTS], apart=apart)
    name = {"X-Session-ID": "one"} if apart else {}
    await world.ask("/messages", title(), name)
    called = await world.ask("/messages", claude(), name)
    await world.ask("/messages", claude(model="claude-haiku-4-5"), SUB_AGENT | name)
    await world.ask("/messages", claude(*result_of(called)), name)
    await world.ask("/messages", claude(tools=[]), SUB_AGENT | name)
    own = "one" if apart else ""
    within = "one/sub" if apart else "sub"
    samples = world.client.samples(1.0)
    assert world.said(samples) == [["so a", "done"], ["found"], ["why"]]
    assert [sample.group for sample in samples] == [own, within, within.replace("sub", "plain")]
    assert world.said(world.client.conversation(within).samples()) == [["found"]]
    if apart:
        assert world.said(world.client.conversation("one").samples()) == [["so a", "done"], ["found"], ["why"]]
        assert world.client.conversation("other").samples() == []
    assert world.client.metrics["chat/untrained_calls"] == 1
    assert world.client.metrics["chat/calls"] == 5
    world.client.close()
    assert len(world.endpoint) == 0


async def test_an_untrained_answer_is_context_of_what_continues_it_and_else_in_no_sample(world: World) -> None:
    """A summary that is asked for within the conversation, and one that ends a branch."""
    quiet = ConversationConfig(header="x-quiet", trained=False)
    await world.begin("first", "summed", "last", "aside", conversations=[quiet])
    messages = [*pi(tools=[])["messages"]]
    for more, quietly in (("", False), ("Sum up.", True), ("Go on.", False), ("Sum up.", True)):
        messages += [{"role": "user", "content": more}] if more else []
        answer = await world.ask(
            "/chat/completions", {"model": "m", "messages": messages}, {"x-quiet": "1"} if quietly else None
        )
        messages.append(answer["choices"][0]["message"])
    (sample,) = world.client.samples(1.0)
    assert world.said([sample]) == [["first", "last"]]
    text = world.chat.tokenizer.decode_all(sample.tokens.tolist())
    assert "summed<|im_end|>" in text
    assert text.endswith("last<|im_end|>")
    assert world.client.metrics["chat/extended"] == 3


async def test_an_episode_all_of_whose_calls_are_untrained_says_so(world: World) -> None:
    await world.begin("so", conversations=[ConversationConfig(tools=OfferedTools.some, trained=False)])
    await world.ask("/chat/completions", pi())
    assert world.client.samples() == []
    assert "untrained by rollout.endpoint.conversations" in world.client.why_no_samples


@pytest.mark.parametrize("repeated", Repeated)
async def test_answers_that_a_program_threw_away_are_counted_and_dropped_on_request(
    world: World, repeated: Repeated
) -> None:
    """An answer is thrown away if the same is asked again after it and no call continues it."""
    await world.begin("cut", "so a", "gone", "done", "anew", rules=ChatPolicy(repeated=repeated))
    await world.ask("/messages", claude())
    called = await world.ask("/messages", claude(max_tokens=64000))
    follow = result_of(called)
    await world.ask("/messages", claude(*follow))
    await world.ask("/messages", claude(*follow))
    assert world.client.metrics["chat/repeated_calls"] == 2
    await world.ask("/messages", claude())
    assert world.client.metrics["chat/repeated_calls"] == 3
    kept = [["cut"], ["so a", "gone"], ["done"], ["anew"]]
    dropped = [["so a", "done"], ["anew"]]
    assert world.said(world.client.samples()) == (kept if repeated is Repeated.keep else dropped)


async def test_an_answer_that_was_continued_as_the_beginning_of_another_is_not_thrown_away(world: World) -> None:
    """Nor is that other one an answer to the same."""
    await world.begin("cut", "other", " off", "last", rules=ChatPolicy(repeated=Repeated.drop))
    for begun in ((), (), ({"role": "assistant", "content": "cut"},), ()):
        await world.ask("/messages", claude(*begun))
    assert world.said(world.client.samples()) == [["cut"], [" off"], ["last"]]
    assert world.client.metrics["chat/repeated_calls"] == 2


def test_the_settings_reach_the_endpoint_and_the_records(chat: ChatFormat) -> None:
    config = ExperimentConfig()
    config.rollout.endpoint.conversations, config.rollout.chat.repeated = [TITLES], Repeated.drop
    config.rollout.chat.parser = "none"
    made = Conversations(config, chat._prompts, {"max_position_embeddings": 4096})
    assert made.endpoint._rules == [TITLES]
    assert made._policy.repeated is Repeated.drop
