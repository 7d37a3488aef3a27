"""Chat templates of real models: they are rendered as transformers renders them, and a parser reads their calls or they
are refused.
"""

from __future__ import annotations

import itertools
import re
import time
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils as reference
from transformers import AutoTokenizer

from asyncrl.api.chat import ToolCall
from asyncrl.chat.parsers import FORMATS, parser, readers, why_thoughts_unread, why_unread
from asyncrl.chat.template import ChatFormat
from asyncrl.data import chat_template
from asyncrl.data.chat_template import ChatError, ChatTemplate
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import load_tokenizer

FOLDER = Path(__file__).parents[2] / "chat_templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
LEFT_OUT = "leaves calls out of the conversation, or writes them in a way"
NOT_SHOWN = "does not show the model any tools"
READ_BY = {
    "trl_qwen2_5": "hermes",
    "trl_qwen3": "hermes",
    "trl_qwen3_5_think": "xml",
    "trl_qwen3_6": "xml",
    "trl_nemotron_3_nano": "xml",
    "trl_glm4moe": "glm",
    "trl_gemma4": "gemma4",
    "trl_gemma4_v5": "gemma4",
    "trl_lfm2_2_5": "lfm2",
    "trl_lfm2_2_5_v2": "lfm2",
    "trl_lfm2_2_5_vl": "lfm2",
    "trl_lfm2_v2": "lfm2",
    "trl_llama3_1": "llama3",
    "vllm_apertus": "apertus",
    "vllm_deepseekr1": "deepseek",
    "vllm_deepseekv31": "deepseek",
    "vllm_granite": "granite",
    "vllm_granite_20b_fc": "granite20b",
    "vllm_hermes": "hermes",
    "vllm_hunyuan_a13b": "hunyuan",
    "vllm_internlm2_tool": "internlm",
    "vllm_mistral": "mistral",
    "vllm_mistral_parallel": "mistral",
    "vllm_xlam_qwen": "json",
}
REFUSED = {
    "trl_lfm2": LEFT_OUT,
    "trl_gptoss": LEFT_OUT,
    "trl_muse_glimmer": LEFT_OUT,
    "vllm_gemma3_pythonic": LEFT_OUT,  # no commas between arguments
    "vllm_phi4_mini": LEFT_OUT,  # Python's form of a map within JSON
    "vllm_llama4_pythonic": LEFT_OUT,  # quotes that are not escaped, numbers as texts
    "trl_deepseekv3": NOT_SHOWN,
    "trl_deepseek_r1_distill": NOT_SHOWN,
    "trl_phi3": NOT_SHOWN,
    "trl_qwen2_5_vl": NOT_SHOWN,
}
ALL = sorted({*READ_BY, *REFUSED})


def template(name: str) -> ChatTemplate:
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), SPECIAL)


def test_each_template_is_in_one_of_the_tables() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*.jinja")) == ALL


@pytest.mark.parametrize("name", READ_BY)
def test_the_parser_of_a_real_template_is_found_by_a_call_that_it_writes(name: str) -> None:
    chat = template(name)
    assert readers(chat)[0] == READ_BY[name]
    assert why_unread(chat) is why_unread(chat, READ_BY[name]) is None
    others = [each for each in FORMATS if each not in ("none", *readers(chat))]
    assert all(READ_BY[name] in (why_unread(chat, other) or "") for other in others)


@pytest.mark.parametrize("name", REFUSED)
def test_a_real_template_without_readable_calls_is_refused_with_the_reason(name: str) -> None:
    assert readers(template(name)) == []
    for each in ("", "hermes"):
        assert REFUSED[name] in (why_unread(template(name), each) or "")


def test_thoughts_of_a_real_template_are_read_or_refused_with_how_they_are_written() -> None:
    refused = {name: why_thoughts_unread(template(name), in_turns=True) for name in ALL}
    assert {name for name, why in refused.items() if why} == {"trl_gptoss", "trl_muse_glimmer"}
    assert "writes thoughts as '<|channel|>analysis<|message|>...<|end|>" in str(refused["trl_gptoss"])
    assert "writes thoughts as ' to=self<|message|>...<|eom|>" in str(refused["trl_muse_glimmer"])
    verdicts = {name for name in ALL if why_thoughts_unread(template(name), in_turns=False)}
    assert verdicts == {"trl_muse_glimmer"}, "verdicts find the final channel of gpt-oss"


TOOL = {
    "type": "function",
    "function": {
        "name": "add_row",
        "description": "Adds é.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "string", "description": "A text."},
                "n": {"type": ["integer", "null"], "description": "A number.", "enum": [1, 2]},
                "o": {"type": "object", "description": "A map.", "properties": {"q": {"type": "string"}}},
                "l": {"type": "array", "items": {"type": "integer"}, "description": "A list."},
            },
            "required": ["a"],
        },
    },
}
ARGUMENTS = {"a": 'He said "it\'s"\nand <left>, é.', "n": 3, "b": True, "z": None, "o": {"k": [1, {"m": "v"}]}}
CALL = {"id": "c00000000", "type": "function", "function": {"name": "add_row", "arguments": ARGUMENTS}}
USER: dict[str, Any] = {"role": "user", "content": "Q?"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be é."}
THOUGHT: dict[str, Any] = {"role": "assistant", "content": "<think>so</think>\n\nHello"}
REASONED: dict[str, Any] = {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c00000000", "name": "add_row", "content": "44"}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [USER, THOUGHT, USER],
    [SYSTEM, USER, REASONED, USER],
    [USER, CALLED, RESULT],
    [SYSTEM, USER, CALLED, RESULT, REASONED, USER],
    [USER, {**CALLED, "tool_calls": [CALL, {**CALL, "id": "c00000001"}]}, RESULT, RESULT],
    [USER, THOUGHT],
]


@pytest.mark.parametrize("name", ALL)
def test_a_real_template_is_rendered_as_transformers_renders_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Now(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime(2024, 7, 26, tzinfo=tz)

    monkeypatch.setattr(chat_template, "datetime", Now)
    monkeypatch.setattr(reference, "datetime", Now)
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    chat, rendered = ChatTemplate(source, SPECIAL), 0
    chat._takes_parts_alone = False
    for turns, tools, to_answer in itertools.product(CONVERSATIONS, ([], [TOOL]), (True, False)):
        options = {"tools": tools or None, "add_generation_prompt": to_answer, **SPECIAL}
        shown = [chat_template._normalised(turn) for turn in turns]
        try:
            (expected,), _ = reference.render_jinja_template([shown], chat_template=source, **options)
        except Exception:
            with pytest.raises(ChatError):
                chat.render_turns(turns, tools, to_answer=to_answer)
            continue
        assert chat.render_turns(turns, tools, to_answer=to_answer) == expected
        rendered += 1
    assert rendered >= 4


CONTROL = re.compile(r"<\|[\w/]+\|?>|<\w+\|>|<｜[^｜]+｜>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>|</?s>")
MORE: dict[str, Any] = {"role": "user", "content": "And then?"}


@pytest.mark.parametrize("name", ALL)
def test_a_conversation_is_extended_by_all_of_its_new_messages_or_not_at_all(
    name: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """GLM ends a call with another token than a text: what lies between the two must not get lost."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*CONTROL.findall(source), *SPECIAL.values()})})
    tokenizer.save_pretrained(tmp_path)
    read = load_tokenizer(tmp_path)
    chat = ChatFormat(PromptFormat(read, ChatTemplate(source, SPECIAL)), parser(READ_BY.get(name, "none")))
    results = [{**RESULT, "content": "first 17"}, {**RESULT, "tool_call_id": "c00000001", "content": "then 18"}]
    two = {**CALLED, "tool_calls": [CALL, {**CALL, "id": "c00000001"}]}
    for reply, new, tools in (
        (REASONED, [MORE], []),
        (CALLED, results[:1], [TOOL]),
        (CALLED, [results[0], MORE], [TOOL]),
        (two, results, [TOOL]),
    ):
        if (bridge := chat.bridge(reply, new, tools)) is None:
            continue
        shown = read.decode_all(bridge.ids)
        assert all(message["content"] in shown for message in new), shown


def test_a_template_with_a_beginning_token_begins_with_one(tokenizer_folder: Path) -> None:
    read = load_tokenizer(tokenizer_folder)
    begins = {"bos_token": "<|begin_of_text|>"}
    chat = ChatTemplate((FOLDER / "trl_llama3_1.jinja").read_text(encoding="utf-8"), begins)
    ids = PromptFormat(read, chat).encode({"prompt": "<|begin_of_text|>Q?"})
    begin = read.control_tokens["<|begin_of_text|>"]
    assert (ids[0], ids.count(begin)) == (begin, 1)


LFM2 = "<|tool_call_start|>[{}]<|tool_call_end|>"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("f(a='x', b=2)", {"a": "x", "b": 2}),
        ('f(a="it\'s, b", b=True)', {"a": "it's, b", "b": True}),
        ("f(a='it\\'s\\n')", {"a": "it's\n"}),
        ("f(a='it's \"so\"\n', b=None)", {"a": 'it\'s "so"\n', "b": None}),
        ('f(a={"k": ["v, w", null, false]}, b=-1.5e3)', {"a": {"k": ["v, w", None, False]}, "b": -1500.0}),
        ("f()", {}),
    ],
)
def test_calls_in_the_form_of_python_are_read(text: str, arguments: dict[str, Any]) -> None:
    parsed = parser("lfm2").parse(LFM2.format(text))
    assert (parsed.calls, parsed.malformed, parsed.content) == ((ToolCall("call_0", "f", arguments),), 0, "")
    several = parser("lfm2").parse(f"I look. {LFM2.format(f'{text}, g(x=1)')}")
    assert [call.name for call in several.calls] == ["f", "g"]
    assert several.content == "I look."


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", LFM2.format("f(a=b)")),
        ("lfm2", LFM2.format("f(a=1, a=2)")),
        ("lfm2", LFM2.format("f(a='x'")),
        ("lfm2", LFM2.format("f(a=" + "[" * 10_000)),
        ("lfm2", LFM2.format("__import__('os')")),
        ("gemma4", "<|tool_call>call:f{a:x}<tool_call|>"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x}<tool_call|>'),
        ("gemma4", "<|tool_call>call:f{a:1"),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1"),
        ("glm", '<tool_call>{"name": "f"}</tool_call>'),
        ("minimax", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>"),
        ("granite", '<|tool_call|>[{"name": "f"'),
        ("apertus", '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>'),
    ],
)
def test_a_malformed_call_of_a_real_format_stays_content_and_is_counted(name: str, text: str) -> None:
    parsed = parser(name).parse(text)
    assert (parsed.calls, parsed.malformed, parsed.content) == ((), 1, text)


@pytest.mark.parametrize(
    ("name", "piece"), [("lfm2", "<|tool_call_start|>[f(a='"), ("gemma4", '<|tool_call>call:f{a:<|"|>')]
)
def test_a_model_that_begins_calls_without_end_is_read_in_time(name: str, piece: str) -> None:
    begun = time.process_time()
    parsed = parser(name).parse(piece * 10_000)
    assert (parsed.calls, parsed.malformed) == ((), 10_000)
    assert time.process_time() - begun < 4.0  # it was nine


def test_mistral_writes_its_calls_in_two_ways() -> None:
    for text in (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "x"}]',
        '[TOOL_CALLS]f[CALL_ID]x1[ARGS]{"a": 1}',
    ):
        assert parser("mistral").parse(text).calls == (ToolCall("call_0", "f", {"a": 1}),)
