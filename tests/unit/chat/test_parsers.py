"""Formats of tool calls: what is written is read again, and nothing that a model may write raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.api.chat import ToolCall
from asyncrl.chat.parsers import FORMATS, parser, readers, why_unread
from asyncrl.data.chat_template import ChatTemplate

WITH_CALLS = [name for name in FORMATS if name != "none"]
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
_tricky = st.sampled_from(
    [
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "f"}',
        "a\nb",
        "\n",
        '"',
        "\\",
        "<function=g>",
        "; ",
        "```",
        "é漢🙂",
    ]
)
_scalars = st.one_of(
    _text, _tricky, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)
)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3), max_leaves=6
)
_names = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
_calls = st.lists(st.tuples(_names, st.dictionaries(_names, _values, max_size=3)), min_size=1, max_size=3)


def _made(calls):
    return tuple(ToolCall(f"call_{number}", name, arguments) for number, (name, arguments) in enumerate(calls))


def _kind(value):
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
    return kinds.get(type(value), "object")


def _schemas(calls):
    """Schemas by which an XML format gets every argument back as it was; of calls of one name the first counts."""
    found = {}
    for call in calls:
        properties = {key: {"type": _kind(value)} for key, value in call.arguments.items()}
        function = {"name": call.name, "parameters": {"type": "object", "properties": properties}}
        found.setdefault(call.name, {"type": "function", "function": function})
    return list(found.values())


AS_TEXT = ("xml", "glm", "minimax", "gemma4", "lfm2")
"""Formats that cannot write every text: by its marks, or by the tool's schema."""


@pytest.mark.parametrize("name", [name for name in WITH_CALLS if name not in AS_TEXT])
@given(calls=_calls)
def test_what_is_written_as_json_is_read_again(name, calls):
    written = _made(calls)
    parsed = parser(name).parse(parser(name).render(written))
    assert (parsed.calls, parsed.content, parsed.malformed, parsed.reasoning) == (written, "", 0, None)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_letters_are_written_as_they_are_and_quotes_and_blanks_are_read_again(name):
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": {"type": "array"}}}}
    for text in ("é\u4f60", "it's", 'say "it"', "a, b='c'", "\n"):
        calls = (ToolCall("call_0", "f", {"a": text, "b": ["é", {"ü": None}]}),)
        written = parser(name).render(calls)
        assert "é" in written
        assert "ü" in written
        assert parser(name).parse(written, [{"type": "function", "function": tool}]).calls == calls


_identifiers = st.from_regex(r"[a-z_][a-z0-9_]{0,9}", fullmatch=True)


@given(
    calls=st.lists(st.tuples(_identifiers, st.dictionaries(_identifiers, _values, max_size=3)), min_size=1, max_size=3)
)
def test_what_is_written_as_python_is_read_again(calls):
    written = _made(calls)
    parsed = parser("lfm2").parse(parser("lfm2").render(written))
    assert (parsed.calls, parsed.content, parsed.malformed) == (written, "", 0)


@pytest.mark.parametrize("name", ["xml", "glm", "minimax"])
@given(
    calls=st.lists(
        st.tuples(_names, st.dictionaries(_names, _values, max_size=3)),
        min_size=1,
        max_size=3,
        unique_by=lambda call: call[0],
    )
)
def test_what_is_written_as_xml_is_read_again_by_its_schema(name, calls):
    written = _made(calls)
    parsed = parser(name).parse(parser(name).render(written), _schemas(written))
    assert (parsed.calls, parsed.content, parsed.malformed) == (written, "", 0)


_pieces = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "<function=f>",
            "</function>",
            "<parameter=a>",
            "</parameter>",
            "<|python_tag|>",
            '{"name":',
            '"f"',
            ",",
            '"arguments"',
            '"parameters"',
            ":",
            "{",
            "}",
            "[",
            "]",
            ";",
            "```",
            "```json",
            "NaN",
            "1e999",
            '"\\ud800"',
            '"',
            "\\",
            "\x00",
        ]
    )
    | st.text(max_size=5),
    max_size=25,
)


@pytest.mark.parametrize("name", FORMATS)
@given(pieces=_pieces)
def test_no_text_raises_and_calls_can_be_encoded(name, pieces):
    schema = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    parsed = parser(name).parse("".join(pieces), [schema])
    for call in parsed.calls:
        json.dumps(dict(call.arguments), ensure_ascii=False, allow_nan=False)
        if name != "xml":
            json.dumps(dict(call.arguments), ensure_ascii=False, allow_nan=False).encode()
    assert parsed.malformed >= 0


@given(text=st.text(max_size=60))
def test_text_without_marks_is_content_as_it_is(text):
    if not any(mark in text for mark in ("<", "[THINK]", "[/THINK]")):
        assert parser("hermes").parse(text).content == text


HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_text_around_a_call_is_content():
    parsed = parser("hermes").parse(f"I add them.\n{HERMES}")
    assert parsed.content == "I add them."
    assert parsed.calls == (ToolCall("call_0", "f", {"a": 1}),)


def test_several_calls_of_one_answer_are_read_in_order():
    parsed = parser("hermes").parse(HERMES + "\n" + HERMES.replace("1", "2"))
    assert [call.arguments["a"] for call in parsed.calls] == [1, 2]
    assert [call.id for call in parsed.calls] == ["call_0", "call_1"]


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<think>", "</think>"),
        ("<|channel>thought", "<channel|>"),
        ("◁think▷", "◁/think▷"),
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<think>a </seed:think>", "</think>"),
    ],
)
def test_a_call_within_the_reasoning_is_a_thought(opening, closing):
    parsed = parser("hermes").parse(f"{opening}\nI could write {HERMES}\n{closing}\n\nNo need: 4.")
    assert (parsed.calls, parsed.content, parsed.malformed) == ((), "No need: 4.", 0)
    assert parsed.reasoning is not None
    assert HERMES in parsed.reasoning


def test_reasoning_that_the_prompt_began_ends_at_its_mark():
    parsed = parser("hermes").parse(f"maybe {HERMES} or not</think>{HERMES}")
    assert len(parsed.calls) == 1
    assert parsed.reasoning is not None
    assert parsed.reasoning.startswith("maybe")


def test_marks_that_a_prompt_may_ask_for_stay_in_the_content():
    text = f"<reasoning>so</reasoning>{HERMES}<answer>4</answer>"
    parsed = parser("hermes").parse(text)
    assert (parsed.content, parsed.reasoning) == (text.replace(HERMES, ""), None)
    assert len(parsed.calls) == 1


def test_a_second_end_of_the_reasoning_is_content() -> None:
    parsed = parser("hermes").parse("so</think> 4 </think>!")
    assert (parsed.reasoning, parsed.content) == ("so", "4 </think>!")
    parsed = parser("hermes").parse("a<think> b\n</think> c <think></think>d<think>\ne</think>")
    assert (parsed.reasoning, parsed.content) == ("b\ne", "a c d")


def test_blanks_around_an_answer_stay_where_it_has_neither_calls_nor_reasoning() -> None:
    for name in FORMATS:
        assert parser(name).parse("\n4 \n").content == "\n4 \n"
    assert parser("hermes").parse("<think>\n4 \n").reasoning == "4"


def test_a_text_too_long_to_be_parsed_is_content() -> None:
    for size, calls in ((4_000_000, 1), (4_000_001, 0)):
        parsed = parser("hermes").parse(HERMES + "x" * (size - len(HERMES)))
        assert (len(parsed.calls), len(parsed.content)) == (calls, size - calls * len(HERMES))


@pytest.mark.parametrize("name", ["llama3", "json"])
def test_a_call_without_marks_is_one_only_where_no_text_comes_before_it(name: str) -> None:
    call = parser(name).render([ToolCall("", "f", {"a": 1})])
    assert len(parser(name).parse(f"<think>so</think>\n\n{call}").calls) == 1
    for text in (f"I call {call}", f"I\n{call}", f'{{"name": "f", "x": 1}} {call}'):
        parsed = parser(name).parse(text)
        assert (parsed.calls, parsed.content) == ((), text)


def test_reasoning_that_is_cut_off_holds_no_call():
    assert parser("hermes").parse(f"<think>first {HERMES}").calls == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": -1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argum'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} and more'),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>"),
        ("llama3", '{"name": "f", "parameters": {"a"'),
        ("llama3", "<|python_tag|>print(1)"),
        ("llama3", '{"name": "f", "parameters": {}} is my answer'),
        ("json", '```json\n{"name": "f", "arguments": {"a": }}\n```'),
        ("json", '[{"name": "f", "arguments": {}}, 3]'),
        ("json", '{"name": "f", "arguments": {}, "parameters": {}}'),
        ("json", '{"name": "", "arguments": {}}'),
        ("json", '```json\n{"name": "f", "arguments": {}}\n```x'),
        ("json", '```json\n{"name": "f", "arguments": {}}\nyes'),
        ("json", '{"name": "f", "arguments": {}}\n```'),
        ("json", '{"name": "f", "arguments": {}}; {"name": "g", "arguments": {}}'),
        ("internlm", '<|action_start|><|plugin|>{"name": "f", "parameters": {}, "arguments": {}}<|action_end|>'),
        ("apertus", '<|tools_prefix|>[{"f": {}, "g": {}}]<|tools_suffix|>'),
        ("apertus", '<|tools_prefix|>[{"": {}}]<|tools_suffix|>'),
        ("hunyuan", "<tool_calls>[]</tool_calls>"),
        ("hunyuan", '<tool_calls>[{"name": "f", "arguments": {}}, 3]</tool_calls>'),
        ("mistral", '[TOOL_CALLS]f[ARGS][{"a": 1}]'),
        ("xml", "<function=f>"),
        ("xml", "<function= ></function>"),
        ("xml", "<function=f><parameter= >1</parameter></function>"),
        ("xml", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
        ("xml", "<tool_call>{}</tool_call>"),
        ("xml", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>"),
    ],
)
def test_a_malformed_call_stays_content_and_is_counted(name, text):
    parsed = parser(name).parse(text)
    assert (parsed.calls, parsed.malformed, parsed.content) == ((), 1, text)


@pytest.mark.parametrize("name", ["llama3", "json"])
@pytest.mark.parametrize(
    "text", ["The answer is 4", '{"x": 1}', '{"name": "Bob", "age": 3}', "[1, 2]", "```\nx\n```", ""]
)
def test_an_answer_that_is_no_call_is_not_malformed(name, text):
    parsed = parser(name).parse(text)
    assert (parsed.calls, parsed.malformed, parsed.content) == ((), 0, text)


def test_a_good_call_beside_a_malformed_one_counts():
    parsed = parser("hermes").parse(f"<tool_call>oops</tool_call>\n{HERMES}")
    assert (len(parsed.calls), parsed.malformed) == (1, 1)
    assert parsed.content == "<tool_call>oops</tool_call>"


def test_a_whole_call_may_lack_its_closing_mark_at_the_end():
    assert len(parser("hermes").parse(HERMES.removesuffix("</tool_call>")).calls) == 1
    xml = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
    assert len(parser("xml").parse(xml).calls) == 1
    assert len(parser("xml").parse(f"{xml}and more").calls) == 0


@pytest.mark.parametrize("name", ["hermes", "internlm"])
def test_a_call_without_arguments_has_none(name: str) -> None:
    text = (
        parser(name).render([ToolCall("", "f", {})]).replace(', "arguments": {}', "").replace(', "parameters": {}', "")
    )
    assert parser(name).parse(text).calls == (ToolCall("call_0", "f", {}),)


def test_llama_calls_may_follow_its_tag_and_a_semicolon():
    text = '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    for ending in ("", ";", " ; \n"):
        assert [call.name for call in parser("llama3").parse(text + ending).calls] == ["f", "g"]
    assert len(parser("llama3").parse('{"type": "function", "name": "f", "parameters": {}}').calls) == 1


def test_json_calls_may_be_fenced_and_a_list():
    text = '```json\n[{"name": "f", "arguments": {}}, {"name": "g", "parameters": {"b": 2}}]'
    for ending in ("", "\n```"):
        calls = parser("json").parse(text + ending).calls
        assert [(call.name, call.arguments) for call in calls] == [("f", {}), ("g", {"b": 2})]


@pytest.mark.parametrize(("deep", "calls"), [(49, 1), (50, 0)])
def test_values_may_be_nested_fifty_deep(deep: int, calls: int) -> None:
    text = "<|tool_call>call:f{a:" + "{a:" * deep + "1" + "}" * deep + "}<tool_call|>"
    parsed = parser("gemma4").parse(text)
    assert (len(parsed.calls), parsed.malformed) == (calls, 1 - calls)


def test_xml_values_have_the_types_of_the_schema_and_else_stay_text():
    properties = {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "items": {"type": "array"},
        "choice": {"enum": [1, 2]},
    }
    schema = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    written = {
        "text": "12", "count": "x", "flag": "True", "maybe": "None", "either": "seven", "items": "[1, 2]",
        "choice": "2", "unknown": "3",
    }  # fmt: skip
    text = "<function=f>" + "".join(f"<parameter={k}>\n{v}\n</parameter>" for k, v in written.items()) + "</function>"
    (call,) = parser("xml").parse(text, [schema]).calls
    assert call.arguments == {
        "text": "12", "count": "x", "flag": True, "maybe": None, "either": "seven", "items": [1, 2], "choice": 2,
        "unknown": "3",
    }  # fmt: skip


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize("name", ["xml", "glm", "minimax"])
@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/definitions/Point"}, '{"x": 1}', {"x": 1}),
        ({"allOf": [{"$ref": "#/$defs/Point"}], "description": "a point"}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, "None", None),
        ({"oneOf": [{"type": "object"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"properties": {"x": {"type": "integer"}}}, '{"x": 1}', {"x": 1}),
        ({"items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"type": "array", "items": {"$ref": "#/$defs/Point"}}, '[{"x": 1}]', [{"x": 1}]),
        ({"$ref": "#/$defs/N"}, "10", 10),
        ({"$ref": "#/$defs/N"}, "x", "x"),
        ({"$ref": "#/$defs/Alias"}, "10", 10),
        ({"$ref": "#/$defs/Missing"}, "10", "10"),
        ({"$ref": "https://example.org/schema.json"}, "10", "10"),
        ({"$ref": "#/$defs/Loop"}, "10", "10"),
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [0.5, 1.0]}, "1", 1),
        ({"type": ["integer", "string"]}, "10", 10),
        ({"type": "string"}, "10", "10"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": ["boolean", "null"]}, "None", None),
        ({"type": "integer"}, "1 2", "1 2"),
        ({"type": "integer"}, " 1\n", 1),
        ({"type": "boolean"}, "False", False),
        ({"type": "integer"}, "True", "True"),
        ({"type": "string", "pattern": "(a+)+$"}, "a" * 60 + "b", "a" * 60 + "b"),
        ({"type": "number", "multipleOf": 0.5}, "1.5", 1.5),
        ({"description": "anything"}, '{"x": 1}', '{"x": 1}'),
        ({}, "10", "10"),
        (True, "10", "10"),
        ({"type": "nonsense"}, "10", "10"),
    ],
)
def test_a_value_has_the_type_that_its_json_schema_says(name, schema, raw, value):
    definitions = {
        "Point": POINT, "N": {"type": "integer"}, "Alias": {"$ref": "#/$defs/N"}, "Loop": {"$ref": "#/$defs/Loop"},
    }  # fmt: skip
    parameters = {"type": "object", "properties": {"p": schema}, "$defs": definitions, "definitions": definitions}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = parser(name).render([ToolCall("", "f", {"p": raw})])
    found = parser(name).parse(text, [tool]).calls[0].arguments["p"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("name", ["xml", "glm", "minimax"])
@pytest.mark.parametrize("function", [{"name": "f"}, {"name": "f", "parameters": None}, {"name": "g"}])
def test_arguments_of_a_tool_without_a_schema_stay_text(name, function):
    text = parser(name).render([ToolCall("", "f", {"a": "1", "b": "true"})])
    (call,) = parser(name).parse(text, [{"type": "function", "function": function}]).calls
    assert call.arguments == {"a": "1", "b": "true"}


def test_the_parameters_themselves_may_be_a_reference():
    of_args = {"type": "object", "properties": {"p": {"type": "integer"}}}
    tool = {"name": "f", "parameters": {"$ref": "#/$defs/Args", "$defs": {"Args": of_args}}}
    text = parser("xml").render([ToolCall("", "f", {"p": "3"})])
    assert parser("xml").parse(text, [{"type": "function", "function": tool}]).calls[0].arguments == {"p": 3}


def test_code_in_an_xml_value_is_kept_as_it_is():
    code = "if a < 3:\n    print('</parameter>')"
    text = f"<function=f><parameter=code>\n{code}\n</parameter></function>"
    assert parser("xml").parse(text).calls[0].arguments == {"code": code}


BARE = (
    "{% for m in messages %}{{ m.content }}{% for c in (m.tool_calls or [])[:1] %}%s{% endfor %}.{% endfor %}"
    "{{ tools }}"
)
AS_JSON = '{"name": "{{ c.function.name }}", "%s": {{ c.function.arguments | tojson }}}'


@pytest.mark.parametrize(("key", "names"), [("parameters", ["llama3", "json"]), ("arguments", ["json", "llama3"])])
def test_the_calls_that_a_template_writes_tell_the_format(key, names):
    assert readers(ChatTemplate(BARE.replace("%s", AS_JSON.replace("%s", key)), {})) == names


def test_a_template_whose_calls_are_not_read_is_refused_with_the_reason():
    unknown = ChatTemplate(BARE.replace("%s", "CALL {{ c.function.name }} {{ c.function.arguments }}"), {})
    assert "no format reads the same call again" in (why_unread(unknown) or "")
    hermes = ChatTemplate(BARE.replace("%s", "<tool_call>" + AS_JSON.replace("%s", "arguments") + "</tool_call>"), {})
    assert why_unread(hermes) is None
    assert "use auto, or hermes" in (why_unread(hermes, "xml") or "")
    assert "does not show the model any tools" in (why_unread(ChatTemplate("{{ messages[0].content }}", {})) or "")
    text_alone = BARE.replace("%s", "<tool_call>" + AS_JSON.replace("%s", "arguments").replace("tojson", "string"))
    assert "no format reads the same call again" in (why_unread(ChatTemplate(text_alone, {})) or "")


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="choose hermes"):
        parser("hermse")
    with pytest.raises(ValueError, match="'none' has no tool calls"):
        parser("none").render([ToolCall("", "f", {})])
