"""A chat template that loops or makes texts without end is ended by name; the next conversation is rendered."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from asyncrl.config.setting import ConfigError
from asyncrl.plugins.datasets.prompt_format import load_chat_template
from asyncrl.plugins.datasets.templates import template_process
from asyncrl.plugins.datasets.templates.chat_template import ChatError, ChatTemplate
from asyncrl.plugins.datasets.templates.template_process import RENDERING, TemplateLimit, TemplateProcess
from tests.unit.plugins.datasets.test_chat import QWEN

NOW = datetime(2024, 7, 26)
LOOPS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a number": "{{ ((messages[0].content | length) ** (10 ** 9)) is odd }}",
    "a filter": "{{ ('<!-- -->' * (messages | length * 4 * 10 ** 6)) | striptags }}",
}
TEXTS = {
    "a product": "{{ 'x' * 10 ** 10 }}",
    "a product of constants": "{{ 'x' * 10000000000 }}",
    "a width": "{{ '%10000000000d' % 1 }}",
    "a filter": "{{ 'x' | center(10000000000) }}",
    "repeated concatenation": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
    ),
    "doubling with ~": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
    ),
    "replacement": "{{ ('x' * 10 ** 6) | replace('x', 'y' * 10 ** 6) }}",
    "output in loops": "{% set x = 'x' * 10 ** 6 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "a list": "{{ [0] * 10 ** 10 }}",
    "text within the memory": "{{ 'x' * (2 * 10 ** 6 + messages | length) }}",
}


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limits that are reached soon."""
    RENDERING.close()
    monkeypatch.setattr(template_process, "CPU_LIMIT_S", 0.5)
    yield
    RENDERING.close()


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    RENDERING.close()
    monkeypatch.setattr(template_process, "CPU_LIMIT_S", 60.0)
    monkeypatch.setattr(template_process, "MEMORY_LIMIT_BYTES", 128 << 20)
    monkeypatch.setattr(template_process, "TEXT_LIMIT_CHARS", 2 * 10**6)
    yield
    RENDERING.close()


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("bomb", LOOPS)
def test_a_template_that_takes_too_long_is_named_and_others_go_on(bomb: str) -> None:
    template = ChatTemplate("{% if messages[0].content == 'boom' %}" + LOOPS[bomb] + "{% endif %}fine", {})
    assert template.render("x") == "fine"
    with pytest.raises(TemplateLimit, match=r"'default' needs more than 0\.5 s of CPU time.*dataset\.chat_template"):
        template.render("boom")
    assert template.render("x") == "fine"


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("bomb", TEXTS)
def test_a_template_that_makes_too_much_text_is_named_and_others_go_on(bomb: str) -> None:
    with pytest.raises((TemplateLimit, ChatError), match=r"'default' makes more than 2000000 |too (large|big)"):
        ChatTemplate(TEXTS[bomb], {}).render("x")
    assert ChatTemplate(QWEN, {}).render("x").endswith("assistant\n")


def test_a_conversation_of_many_megabytes_is_within_the_limits() -> None:
    long = "é" * (16 << 20)
    assert long in ChatTemplate(QWEN, {}).render(long)


@pytest.mark.usefixtures("_short")
def test_a_run_with_such_a_template_is_refused_before_it_starts(tmp_path: Path) -> None:
    class Settings:
        chat_template = "auto"
        chat_template_args: dict[str, object] = {}  # noqa: RUF012
        system_prompt = ""

    (tmp_path / "chat_template.jinja").write_text(LOOPS["macros"])
    with pytest.raises(ConfigError, match=r"dataset\.chat_template='auto' .*'default' needs more than 0\.5 s"):
        load_chat_template(tmp_path, Settings())


@pytest.mark.usefixtures("_short")
def test_the_time_of_many_renderings_does_not_add_up() -> None:
    busy, used_s = "{% for i in range(99999) %}{% endfor %}{{ n }}", 0.0
    while used_s < 0.5:
        assert RENDERING.rendered(busy, {"n": 1}, NOW) == "1"
        assert RENDERING._process is not None
        times = psutil.Process(RENDERING._process.pid).cpu_times()
        used_s = times.user + times.system


def test_a_process_that_was_killed_is_started_again() -> None:
    process = TemplateProcess()
    assert process.rendered("{{ n }}", {"n": 1}, NOW) == "1"
    assert process._process is not None
    first = process._process.pid
    os.kill(first, signal.SIGKILL)
    process._process.wait()
    assert process.rendered("{{ n }}", {"n": 2}, NOW) == "2"
    assert process._process.pid != first
    process.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("size", [1, 10**6], ids=["short", "longer than the pipe"])
def test_a_rendering_that_uses_no_time_ends_with_the_limit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    process = TemplateProcess()
    assert process.rendered("{{ n }}", {"n": 1}, NOW) == "1"
    assert process._process is not None
    stopped = process._process
    stopped.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(template_process, "WALL_LIMIT_S", 0.1, raising=False)
        with pytest.raises(TemplateLimit, match=r"needs more than 0\.1 s for one conversation"):
            process.rendered("{{ n }}", {"n": "x" * size}, NOW)
    assert stopped.returncode == -signal.SIGKILL
    assert process.rendered("{{ n }}", {"n": 2}, NOW) == "2"
    process.close()


@pytest.mark.timeout(30)
def test_a_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "END_LIMIT_S", 0.1, raising=False)
    process = TemplateProcess()
    assert process.rendered("{{ n }}", {"n": 1}, NOW) == "1"
    assert process._process is not None
    stopped = process._process
    stopped.send_signal(signal.SIGSTOP)
    process.close()
    assert stopped.returncode == -signal.SIGKILL


def test_a_forked_process_has_one_of_its_own() -> None:
    assert RENDERING.rendered("{{ n }}", {"n": 1}, NOW) == "1"
    child = os.fork()
    if child == 0:
        os._exit(0 if RENDERING._process is None and RENDERING.rendered("{{ n }}", {"n": 2}, NOW) == "2" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert RENDERING.rendered("{{ n }}", {"n": 3}, NOW) == "3"


class Users:
    """A user's class, which the process that renders does not have."""


@pytest.mark.parametrize("value", [lambda: 1, Users(), 2**64, "\ud800"])
def test_what_is_no_data_is_refused(value: object) -> None:
    with pytest.raises(ChatError, match=r"gets a value that is not plain data .*dataset\.chat_template_args"):
        ChatTemplate("{{ f }}", {}, {"f": value}).render("x")


def test_all_plain_data_arrives() -> None:
    value = {"a": [1, -(2**63), 2.5, True, None, "é"], "b": {"c": {}}}
    assert json.loads(RENDERING.rendered("{{ value | tojson }}", {"value": value}, NOW)) == value
    assert RENDERING.rendered("{{ strftime_now('%Y-%m-%d %H') }}", {}, NOW) == "2024-07-26 00"
