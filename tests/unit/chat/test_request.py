"""What a conversation uses of its limits, what ends it, and what a limit is called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.api import ChatFinish
from asyncrl.chat.conversation import ChatLimits, ChatRequest

ANSWERS = st.sampled_from([ChatFinish.stop, ChatFinish.length, ChatFinish.tool_calls])


def running(limits: ChatLimits | None = None, tokens: int = 10) -> ChatRequest:
    return ChatRequest(limits or ChatLimits()).begin(tokens)


def test_a_turn_with_tools_goes_round_and_ends() -> None:
    request = running().answered(ChatFinish.tool_calls, 5)
    assert (request.calls_tools, request.tokens) == (True, 15)
    request = request.tools_returned(2.0).begin(20).answered(ChatFinish.stop, 3)
    assert (request.calls_tools, request.turns, request.tokens, request.tool_s) == (False, 2, 23, 2.0)
    assert not request.over
    assert not request.begin(30).over


@pytest.mark.parametrize(
    ("limits", "answers", "tool_s", "tokens", "over"),
    [
        (ChatLimits(max_turns=1), 1, 0.0, 30, "rollout.chat.max_turns=1"),
        (ChatLimits(max_context=30), 1, 0.0, 30, "generation.context_length=30"),
        (ChatLimits(max_context=30, context_setting="generation.max_total_tokens"), 1, 0.0, 31, "generation.max_total"),
        (ChatLimits(max_tool_s=2.5), 1, 2.5, 30, "rollout.chat.max_tool_s=2.5"),
    ],
)
def test_a_limit_ends_it_where_the_next_answer_would_begin(
    limits: ChatLimits, answers: int, tool_s: float, tokens: int, over: str
) -> None:
    request = running(limits)
    for _ in range(answers):
        request = request.answered(ChatFinish.tool_calls, 5)
    assert not request.over
    request = request.tools_returned(tool_s).begin(tokens)
    assert request.over.startswith(over)
    assert ChatRequest(limits, tokens=0).begin(29).tokens_left == (1 if limits.max_context else None)


def test_an_answer_that_fills_the_context_ends_it_and_one_that_was_cut_shorter_does_not() -> None:
    request = running(ChatLimits(max_context=20))
    assert request.answered(ChatFinish.length, 10).over == "generation.context_length=20"
    cut = request.answered(ChatFinish.length, 4)
    assert not cut.over
    assert not cut.begin(19).over


def test_a_branch_has_used_up_what_its_beginning_has() -> None:
    request = running(ChatLimits(max_turns=2)).answered(ChatFinish.tool_calls, 5).tools_returned(1.0)
    branch = request.forked()
    assert (branch.calls_tools, branch.turns, branch.tool_s, branch.tokens) == (False, 1, 1.0, 0)
    assert branch.begin(5).answered(ChatFinish.stop, 1).begin(9).over == "rollout.chat.max_turns=2"


@given(st.lists(st.tuples(st.integers(0, 30), ANSWERS, st.floats(0, 1), st.floats(0, 3)), max_size=8))
def test_an_answer_begins_only_within_all_limits(steps: list[tuple[int, ChatFinish, float, float]]) -> None:
    limits = ChatLimits(max_turns=4, max_context=100, max_tool_s=5.0)
    request = ChatRequest(limits)
    for turns, (more, finish, share, seconds) in enumerate(steps):
        if request.calls_tools:
            request = request.tools_returned(seconds)
        request = request.begin(request.tokens + more)
        within = turns < limits.max_turns and request.tokens < limits.max_context and request.tool_s < limits.max_tool_s
        assert (request.turns, not request.over) == (turns, within)
        if request.over:
            return
        tokens_left = request.tokens_left
        assert tokens_left is not None
        request = request.answered(finish, max(1, round(tokens_left * share)))
        if request.over:
            assert (finish, request.tokens) == (ChatFinish.length, limits.max_context)
            return
