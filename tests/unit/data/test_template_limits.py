"""A chat template that loops or makes texts without end is stopped by name; the next conversation is rendered."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from asyncrl.config.setting import ConfigError
from asyncrl.data import template_sandbox
from asyncrl.data.chat_template import ChatError, ChatTemplate
from asyncrl.data.prompt_format import load_chat_template
from asyncrl.data.template_sandbox import TemplateLimit
from tests.unit.data.test_chat import QWEN

LOOPS = {
    "a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a filter of a loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "blocks": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "map": "{% for i in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "comparisons": (
        "{% set a = 'x' * (5 * 10 ** 6) %}{% set b = 'x' * (5 * 10 ** 6) %}"
        "{% for i in range(99999) %}{% if a == b %}{% endif %}{% endfor %}"
    ),
}
TEXTS = {
    "a range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "a power": "{{ ((messages[0].content | length) ** (10 ** 9)) is odd }}",
    "squares": (
        "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x is odd }}"
    ),
    "digits": "{{ 10 ** 4300 }}",
    "a product": "{{ 'x' * 10 ** 10 }}",
    "a product of constants": "{{ 'x' * 10000000000 }}",
    "a width": "{{ '%10000000000d' % 1 }}",
    "a computed width": "{{ '%*d' % (10 ** 10, 1) }}",
    "a width of format": "{{ '{:10000000000}'.format(1) }}",
    "a computed width of format": "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "a width of the filter format": "{{ '%10000000000d' | format(1) }}",
    "an indentation": "{{ [1, 2] | tojson(indent=10 ** 10) }}",
    "an indented text": "{{ ('\n' * 10 ** 6) | indent(10 ** 6) }}",
    "a filter that is left out": "{{ 'x' | center(10000000000) }}",
    "a method that is left out": "{{ 'x'.center(10000000000) }}",
    "a method by subscript": "{{ 'x'['ljust'](10000000000) }}",
    "a method by filter": "{{ ('x' | attr('zfill'))(10000000000) }}",
    "repeated concatenation": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
    ),
    "doubling with ~": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
    ),
    "doubling with a block": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}"
        "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}"
    ),
    "doubling with a macro": (
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='x') %}"
        "{% for i in range(60) %}{% set n.x = f(n.x) %}{% endfor %}"
    ),
    "doubling with format": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = '%s%s' % (n.x, n.x) %}{% endfor %}"
    ),
    "doubling with join": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] | join %}{% endfor %}"
    ),
    "lists of lists": (
        "{% set n = namespace(x=[0]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}"
    ),
    "maps of maps": (
        "{% set n = namespace(x={}) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}"
        "{{ n.x | tojson }}"
    ),
    "maps by dict": (
        "{% set n = namespace(x={}) %}{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}"
        "{{ n.x | tojson }}"
    ),
    "replacement": "{{ ('x' * 10 ** 6) | replace('x', 'y' * 10 ** 6) }}",
    "replacement by the method": "{{ ('x' * 10 ** 6).replace('x', 'y' * 10 ** 6) }}",
    "joining": "{{ ('x' * 10 ** 5) | join('y' * 10 ** 5) }}",
    "joining by the method": "{{ ('y' * 10 ** 5).join('x' * 10 ** 5) }}",
    "output in loops": "{% set x = 'x' * 10 ** 6 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "the template's text in loops": "{% for i in range(99999) %}" + "x" * 10**6 + "{% endfor %}",
    "the template's text in a macro": (
        "{% macro f() %}{% for i in range(99999) %}" + "x" * 10**6 + "{% endfor %}{% endmacro %}{{ f() }}"
    ),
    "a list": "{{ [0] * 10 ** 10 }}",
    "slices that are kept": (
        "{% set t = 'x' * 10 ** 6 %}{% set n = namespace(x=[]) %}"
        "{% for i in range(99999) %}{% set n.x = n.x + [t[i:]] %}{% endfor %}"
    ),
    "slices in recursion": (
        "{% macro f(t) %}{% set s = t[1:] %}{{ f(s) }}{{ f(s) }}{% endmacro %}{{ f('x' * 10 ** 6) }}"
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bomb", LOOPS)
def test_a_template_that_takes_too_long_is_named_and_others_go_on(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "CPU_LIMIT_S", 0.5)
    template = ChatTemplate("{% if messages[0].content == 'boom' %}" + LOOPS[bomb] + "{% endif %}fine", {})
    assert template.render("x") == "fine"
    begun = time.thread_time()
    with pytest.raises(
        (TemplateLimit, ChatError), match=r"'default' needs more than 0\.5 s of CPU time|RecursionError"
    ):
        template.render("boom")
    assert time.thread_time() - begun < 5.0
    assert template.render("x") == "fine"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bomb", TEXTS)
def test_a_template_that_makes_too_much_is_named_and_others_go_on(bomb: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((TemplateLimit, ChatError), match="the chat template"):
        ChatTemplate(TEXTS[bomb], {}).render("x")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_500_000  # KiB
    assert ChatTemplate(QWEN, {}).render("x").endswith("assistant\n")


def test_a_conversation_of_many_megabytes_is_within_the_limits() -> None:
    long = "é" * (16 << 20)
    assert long in ChatTemplate(QWEN, {}).render(long)


def test_a_conversation_of_many_messages_is_within_the_limits() -> None:
    turns = [
        {"role": ("user", "assistant")[number % 2], "content": f"<think>{number}</think>x"} for number in range(4001)
    ]
    assert ChatTemplate(QWEN, {}).render(turns).count("<|im_start|>") == 4003


def test_a_run_with_such_a_template_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Settings:
        chat_template = "auto"
        chat_template_args: dict[str, object] = {}  # noqa: RUF012
        system_prompt = ""

    monkeypatch.setattr(template_sandbox, "CPU_LIMIT_S", 0.5)
    (tmp_path / "chat_template.jinja").write_text(LOOPS["macros"])
    with pytest.raises(ConfigError, match=r"dataset\.chat_template='auto' .*'default' needs more than 0\.5 s"):
        load_chat_template(tmp_path, Settings())


def test_the_time_of_many_renderings_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "CPU_LIMIT_S", 0.5)
    busy, begun = ChatTemplate("{% for i in range(9999) %}{% endfor %}fine", {}), time.thread_time()
    while time.thread_time() - begun < 1.0:
        assert busy.render("x") == "fine"


class Users:
    """A user's class, which a template must not reach."""

    secret = "x"


@pytest.mark.parametrize("value", [lambda: 1, Users(), "\ud800"])
def test_what_is_no_data_is_refused(value: object) -> None:
    with pytest.raises(ChatError, match=r"gets a value that is not plain data "):
        ChatTemplate("{{ f }}", {}, {"f": value}).render("x")
