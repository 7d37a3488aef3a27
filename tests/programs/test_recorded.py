"""Requests that agent programs sent are read, and the page's table of programs is theirs."""

from __future__ import annotations

import json
import re

import pytest

from asyncrl.chat.parsers import parser
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.inference.openai.anthropic import Messages
from asyncrl.inference.openai.api_call import Api
from asyncrl.inference.openai.chat_completions import ChatCompletions
from asyncrl.inference.openai.responses import Responses

from .episode import TEMPLATE
from .programs import CHAT, MESSAGES, PROGRAMS, RESPONSES, TASK, Program, offers
from .record import PAGE, name_of, recorded, table

BEGUN = TASK[:15]
"""Of longer texts no more may be left."""
APIS: dict[str, type[Api]] = {CHAT: ChatCompletions, RESPONSES: Responses, MESSAGES: Messages}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_recorded_request_is_read_as_the_conversation_that_took_place(program: Program) -> None:
    body = recorded(program)["body"]
    asked = APIS[program.api]().read(json.dumps(body).encode())
    assert asked.stream == body.get("stream", False)
    own = [tool for tool in body.get("tools", ()) if tool.get("type") in ("function", "custom", None)]
    assert [tool["function"]["name"] for tool in asked.tools] == [name_of(tool) for tool in own]
    assert any(BEGUN in str(message["content"]) for message in asked.messages if message["role"] == "user")

    calls = [made for message in asked.messages for made in message.get("tool_calls") or ()]
    said = [made for text in program.answers[:-1] for made in parser("hermes").parse(text).calls]
    if program.retells:
        assert not calls
    else:
        functions = [made["function"] for made in calls]
        assert [(each["name"], json.loads(each["arguments"])) for each in functions] == [
            (made.name, made.arguments) for made in said
        ]
        results = [message for message in asked.messages if message["role"] == "tool"]
        assert [each["tool_call_id"] for each in results] == [made["id"] for made in calls]
    text = ChatTemplate(TEMPLATE.read_text(), {}).render(asked.messages, asked.tools)
    assert all(offers(tool["function"]["name"]) in text for tool in asked.tools)


def test_what_the_page_says_of_programs_is_what_was_recorded() -> None:
    assert table() in PAGE.read_text()
    for program in PROGRAMS:
        sent = json.dumps(recorded(program)["body"])
        assert [name for name in re.findall(r"`(.+?)`", program.sends) if f'"{name}"' not in sent] == []
