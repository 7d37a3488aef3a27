"""Parameters of each API's requests are used, ignored or refused; the code in docs/endpoint.md works."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import yaml
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from asyncrl.api import SamplingParams
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.openai import anthropic as api_of_anthropic
from asyncrl.inference.openai import chat_completions, responses
from asyncrl.inference.openai.anthropic import Messages
from asyncrl.inference.openai.api_call import ApiCall, ApiError, pieces
from asyncrl.inference.openai.chat_completions import ChatCompletions
from asyncrl.inference.openai.responses import Responses
from asyncrl.launch import __main__ as launch
from asyncrl.plugins.agents.command import CommandAgent
from asyncrl.plugins.agents.openai_agent import OpenAIAgent
from asyncrl.rollout.conversation_checks import check
from asyncrl.rollout.settings import ConversationConfig, OfferedTools

DOC = (Path(__file__).parents[3] / "docs" / "endpoint.md").read_text()
USER: Any = {"role": "user", "content": "hi"}
BROKEN_CALL = {"id": "c", "function": {"name": "f", "arguments": "["}}
TOOL = {"type": "function", "function": {"name": "f"}}


def chat(**more: Any) -> ApiCall:
    return ChatCompletions().read(json.dumps({"model": "m", "messages": [USER]} | more).encode())


def respond(**more: Any) -> ApiCall:
    return Responses().read(json.dumps({"model": "m", "input": [USER]} | more).encode())


def message(**more: Any) -> ApiCall:
    return Messages().read(json.dumps({"model": "m", "max_tokens": 9, "messages": [USER]} | more).encode())


def document(**source: Any) -> Any:
    return [{"role": "user", "content": [{"type": "document", "source": source}]}]


def parts(kind: str) -> Any:
    return [{"role": "user", "content": [{"type": kind, "text": "x"}]}]


@pytest.mark.parametrize(
    ("read", "given", "named"),
    [
        (chat, {"colour": "red"}, "colour='red': no such parameter"),
        (chat, {"frequency_penalty": 0.5}, "frequency_penalty=0.5: not supported"),
        (chat, {"logit_bias": {"7": 1}}, "logit_bias"),
        (chat, {"top_logprobs": 2, "logprobs": True}, "top_logprobs=2"),
        (chat, {"modalities": ["audio"]}, "modalities"),
        (chat, {"functions": [{"name": "f"}]}, "use tools"),
        (chat, {"chat_template_kwargs": {"enable_thinking": False}}, "dataset.chat_template_args"),
        (chat, {"tools": [TOOL], "tool_choice": "always"}, "tool_choice='always'"),
        (respond, {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice="),
        (chat, {"add_generation_prompt": False}, "add_generation_prompt=False"),
        (chat, {"continue_final_message": True}, "add_generation_prompt=True"),
        (chat, {"tools": [{"type": "custom"}]}, "tools[0].type='custom'"),
        (chat, {"response_format": {"type": "grammar"}}, "response_format"),
        (chat, {"messages": parts("image_url")}, "messages[0].content[0]: part 0 of a message: a picture without"),
        (chat, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role='function'"),
        (
            chat,
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "["}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments: no JSON",
        ),
        (chat, {"n": 0}, "n: 0 answers"),
        (chat, {"top_p": 0}, "top_p"),
        (respond, {"background": True}, "background=True"),
        (respond, {"conversation": "c"}, "use previous_response_id"),
        (respond, {"previous_response_id": "resp_1"}, "'resp_1' is not a response of this session"),
        (respond, {"tools": [{"type": "code_interpreter"}]}, "tools[0].type='code_interpreter'"),
        (respond, {"include": ["file_search_call.results"]}, "file_search_call.results"),
        (respond, {"truncation": "auto"}, "truncation='auto'"),
        (respond, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type='item_reference'"),
        (respond, {"input": parts("input_image")}, "input[0].content[0]: part 0 of a message: a picture without"),
        (message, {"max_tokens": None}, "max_tokens: missing"),
        (message, {"container": "c"}, "container"),
        (message, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type='bash_20250124'"),
        (message, {"tool_choice": {"type": "some"}}, "tool_choice"),
        (message, {"messages": document(type="base64", data="JVBE")}, "messages[0].content[0].source.type='base64'"),
        (message, {"system": [{"type": "image"}]}, "system[0].type='image'"),
        (message, {"messages": parts("image")}, "part 0 of a message: a picture without content"),
        (message, {"output_config": {"task_budget": {"total": 9}}}, "output_config.task_budget"),
        (message, {"output_config": {"format": {"type": "grammar"}}}, "output_config.format"),
        (message, {"mcp_servers": [{"url": "https://example.org", "name": "x", "type": "url"}]}, "mcp_servers"),
        (message, {"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role='critic'"),
    ],
)
def test_what_would_change_the_meaning_is_refused_by_name(
    read: Callable[..., ApiCall], given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ApiError) as refused:
        read(**given)
    assert refused.value.status == 400
    assert named in refused.value.message
    assert refused.value.param
    for form in (refused.value.openai(), refused.value.anthropic()):
        assert form["error"]["message"] == refused.value.message
        assert form["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("read", "given"),
    [
        (chat, {"seed": 7, "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}),
        (chat, {"presence_penalty": 0.0, "logit_bias": {}, "top_logprobs": 0, "modalities": ["text"], "tools": []}),
        (chat, {"frequency_penalty": None, "functions": None, "colour": None}),
        (chat, {"parallel_tool_calls": False, "add_generation_prompt": True, "continue_final_message": False}),
        (respond, {"parallel_tool_calls": False, "client_metadata": {"id": "x"}}),
        (respond, {"context_management": [{"type": "compaction"}]}),
        (respond, {"tools": [{"type": "web_search"}, {"type": "namespace", "name": "multi_agent_v1", "tools": []}]}),
        (message, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
        (message, {"output_config": {"effort": "high"}, "mcp_servers": [], "betas": ["x"]}),
        (message, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        (message, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
        (respond, {"store": False, "truncation": "disabled", "reasoning": {"effort": "low"}, "prompt_cache_key": "k"}),
        (message, {"metadata": {"user_id": "u"}, "service_tier": "auto"}),
    ],
)
def test_what_asks_for_nothing_changes_nothing(read: Callable[..., ApiCall], given: dict[str, Any]) -> None:
    call, plain = read(**given), read()
    assert (call.messages, call.tools, call.n) == (plain.messages, plain.tools, 1)
    assert call.sampling == plain.sampling


OF_OTHERS = {"extra_headers", "extra_query", "extra_body", "timeout"}
"""Parameters of the clients' methods that are no part of a request."""


@pytest.mark.parametrize(
    ("surface", "params"),
    [
        (chat_completions.SURFACE, completion_create_params.CompletionCreateParamsNonStreaming),
        (chat_completions.SURFACE, completion_create_params.CompletionCreateParamsStreaming),
        (responses.SURFACE, response_create_params.ResponseCreateParamsNonStreaming),
        (responses.SURFACE, response_create_params.ResponseCreateParamsStreaming),
        (api_of_anthropic.SURFACE, message_create_params.MessageCreateParamsStreaming),
        (api_of_anthropic.SURFACE, beta_message_create_params.MessageCreateParamsStreaming),
        (api_of_anthropic.COUNT, message_count_tokens_params.MessageCountTokensParams),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_each_parameter_of_the_clients_is_used_ignored_or_refused_with_a_reason(surface: Any, params: Any) -> None:
    names = set(get_type_hints(params))
    known = {*surface.used.__struct_fields__, *surface.ignored, *surface.neutral, *surface.hints}
    assert len(names) > 5
    assert names - known - OF_OTHERS == set()


def test_an_assistants_last_text_is_continued_at_anthropics_and_on_request_at_openais() -> None:
    answered: Any = [USER, {"role": "assistant", "content": "The sum"}]
    assert message(messages=answered).continue_last
    assert message(messages=answered).messages[-1] == {"role": "assistant", "content": "The sum"}
    assert not message(messages=[USER]).continue_last
    assert not chat(messages=answered).continue_last
    assert chat(messages=answered, add_generation_prompt=False, continue_final_message=True).continue_last
    assert not respond(input=answered).continue_last


def test_claude_codes_and_codex_requests_are_read() -> None:
    claude = message(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": "There are sub-agents."},
        ],
        system=[{"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        metadata={"user_id": "u"},
        stream=True,
    )
    assert [each["role"] for each in claude.messages] == ["system", "user", "system"]
    codex = respond(
        instructions="You are Codex.",
        tools=[{"type": "function", "name": "shell", "strict": False, "parameters": {}}, {"type": "web_search"}],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"x": "y"},
    )
    assert [each["function"]["name"] for each in codex.tools] == ["shell"]


@pytest.mark.parametrize(
    ("read", "kind"),
    [(chat, "web_search"), (respond, "tool_search"), (respond, "namespace"), (respond, "image_generation")]
    + [(message, kind) for kind in ("web_search_20250305", "web_fetch_20250910", "tool_search_tool_bm25_20251119")],
)
def test_a_tool_that_the_apis_side_would_run_is_left_out_and_counted(read: Callable[..., ApiCall], kind: str) -> None:
    own = {chat: TOOL, respond: {"type": "function", "name": "f"}, message: {"name": "f", "input_schema": {}}}[read]
    call = read(tools=[{"type": kind, "name": "x"}, own])
    assert [tool["function"]["name"] for tool in call.tools] == ["f"]
    assert call.left_out_tools == 1
    assert read(tools=[own]).left_out_tools == 0


@pytest.mark.parametrize(
    ("read", "choice", "wanted"),
    [
        (chat, "required", True),
        (chat, TOOL, True),
        (chat, "auto", False),
        (respond, "required", True),
        (respond, {"type": "function", "name": "f"}, True),
        (message, {"type": "any", "disable_parallel_tool_use": True}, True),
        (message, {"type": "tool", "name": "f"}, True),
        (message, {"type": "auto"}, False),
    ],
)
def test_a_call_may_be_asked_for_and_is_not_enforced(read: Callable[..., ApiCall], choice: Any, wanted: bool) -> None:
    call = read(tool_choice=choice)
    assert (call.tool_choice, call.wants_call) == ("auto", wanted)


def test_documents_of_text_are_read_and_what_anthropic_alone_can_read_is_not() -> None:
    text = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Four."}, "title": "Sum"}
    cited = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Five."}]}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [cited]}
    hidden = [{"type": "redacted_thinking", "data": "x="}, {"type": "text", "text": "Read."}]
    read = message(messages=[{"role": "assistant", "content": hidden}, {"role": "user", "content": [result, text]}])
    assert read.messages == [
        {"role": "assistant", "content": "Read."},
        {"role": "tool", "tool_call_id": "c", "content": "Five."},
        {"role": "user", "content": "Sum\nFour."},
    ]


@pytest.mark.parametrize("apart", [False, True])
def test_the_billing_line_of_claude_code_is_no_part_of_a_prompt(apart: bool) -> None:
    billing, own = "x-anthropic-billing-header: cc_version=2.1.197.a1f; cc_entrypoint=cli;", "Be brief.\nNo x-headers."
    system: Any = f"{billing}\n{own}"
    if apart:
        system = [{"type": "text", "text": billing}, {"type": "text", "text": own}]
    assert message(system=system).messages[0] == {"role": "system", "content": own}
    assert [each["role"] for each in message(system=billing).messages] == ["user"]


def test_a_request_says_how_it_is_sampled_within_the_experiments_length() -> None:
    own = SamplingParams(max_new_tokens=100, temperature=0.8, top_p=0.9, seed=5)
    assert chat().sampled_by(own) == own
    made = chat(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1, max_tokens=7, stop="END", seed=9).sampled_by(own)
    assert made == SamplingParams(7, 0.0, 0.5, 3, 0.1, seed=5, stop=("END",))
    assert chat(max_completion_tokens=5000, max_tokens=3).sampled_by(own).max_new_tokens == 100
    assert respond(max_output_tokens=9, temperature=0.1).sampled_by(own).max_new_tokens == 9
    assert message(stop_sequences=["a", "b"]).sampled_by(own).stop == ("a", "b")


def test_an_answers_items_are_one_message_again() -> None:
    answered: Any = [
        USER,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "developer", "content": "c"},
    ]
    first, answer, one, two, *rest = respond(input=answered).messages
    assert first == USER
    assert (answer["role"], answer["content"], answer["reasoning_content"]) == ("assistant", "so", "hm")
    assert [call["id"] for call in answer["tool_calls"]] == ["1", "2"]
    assert (one["tool_call_id"], one["content"], two["content"]) == ("1", "one", "two")
    assert [(each["role"], each["content"]) for each in rest] == [
        ("assistant", "a"),
        ("assistant", "b"),
        ("system", "c"),
    ]


@pytest.mark.parametrize("text", ["", " ", "a", "The  answer\n\n is 4. ", "\t\u4f60\u597d \U0001f600\n"])
def test_the_pieces_of_a_stream_are_the_whole(text: str) -> None:
    assert "".join(pieces(text)) == text


def test_the_documents_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", DOC, re.DOTALL)
    python = [code for kind, code in blocks if kind == "python"]
    settings = [yaml.safe_load(code) for kind, code in blocks if kind == "yaml"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text(python[0])
    assert settings[0]["agent"]["path"] == "asyncrl.plugins.agents.openai_agent:OpenAIAgent"
    OpenAIAgent(**settings[0]["agent"]["args"])
    for code in python[1:]:
        compile(code, "docs/endpoint.md", "exec")
    _, side, command, in_container = settings
    rules = ExperimentConfig()
    rules.rollout.endpoint.conversations = [
        ConversationConfig(**{**rule, "tools": OfferedTools(rule.get("tools", "any"))})
        for rule in side["rollout"]["endpoint"]["conversations"]
    ]
    assert list(check(rules)) == []
    for agent in (command["agent"], in_container["agent"]):
        assert agent["path"] == "asyncrl.plugins.agents.command:CommandAgent"
        inspect.signature(CommandAgent).bind(**agent["args"])
    shells = [shlex.split(line, comments=True) for kind, code in blocks if kind == "bash" for line in code.splitlines()]
    assert shells
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append(command) or SimpleNamespace(returncode=0))
    for line in shells:
        assert line[:3] == ["python", "-m", "asyncrl.launch"]
        assert launch.main(line[3:]) == 0
        assert Path(ran[-1][1]).is_file()
        assert ran[-1][2:] == line[5:]
