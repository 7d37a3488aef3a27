"""A conversation's life: which steps are allowed, what ends it, and what a limit is called."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.api import ChatFinish
from asyncrl.chat.conversation import ChatLimits, ChatRequest, IllegalStep, Phase

ANSWERS = st.sampled_from([ChatFinish.stop, ChatFinish.length, ChatFinish.tool_calls])


def running(limits: ChatLimits | None = None, tokens: int = 10) -> ChatRequest:
    return ChatRequest(limits or ChatLimits()).begin(tokens)


def test_a_turn_with_tools_goes_round_and_ends() -> None:
    request = running().answered(ChatFinish.tool_calls, 5)
    assert (request.phase, request.finish, request.tokens) == (Phase.calling_tools, ChatFinish.tool_calls, 15)
    request = request.tools_returned(2.0).begin(20).answered(ChatFinish.stop, 3)
    assert (request.phase, request.turns, request.tokens, request.tool_s) == (Phase.completed, 2, 23, 2.0)
    assert not request.ended
    assert request.begin(30).phase is Phase.running


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
    assert not request.ended
    request = request.tools_returned(tool_s).begin(tokens)
    assert (request.phase, request.finish, request.ended) == (Phase.completed, ChatFinish.length, True)
    assert request.over.startswith(over)
    assert ChatRequest(limits, tokens=0).begin(29).room == (1 if limits.max_context else None)


def test_an_answer_that_fills_the_context_ends_it_and_one_that_was_cut_shorter_does_not() -> None:
    request = running(ChatLimits(max_context=20))
    assert request.answered(ChatFinish.length, 10).over == "generation.context_length=20"
    cut = request.answered(ChatFinish.length, 4)
    assert (cut.finish, cut.ended) == (ChatFinish.length, False)
    assert cut.begin(19).phase is Phase.running


def test_a_branch_has_used_up_what_its_beginning_has() -> None:
    request = running(ChatLimits(max_turns=2)).answered(ChatFinish.tool_calls, 5).tools_returned(1.0)
    branch = request.forked()
    assert (branch.phase, branch.turns, branch.tool_s, branch.tokens) == (Phase.pending, 1, 1.0, 0)
    assert branch.begin(5).answered(ChatFinish.stop, 1).begin(9).over == "rollout.chat.max_turns=2"


class Life(RuleBasedStateMachine):
    """Any steps in any order: those that a phase allows succeed, others raise and change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.request = ChatRequest(ChatLimits(max_turns=4, max_context=100, max_tool_s=5.0))
        self.answers = 0

    def refused(self, step: str, *args: object) -> None:
        before = replace(self.request)
        with pytest.raises(IllegalStep):
            getattr(self.request, step)(*args)
        assert self.request == before

    @rule(more=st.integers(0, 30))
    def begin(self, more: int) -> None:
        if self.request.ended or self.request.phase is Phase.running:
            self.refused("begin", self.request.tokens + more)
        else:
            self.request = self.request.begin(self.request.tokens + more)

    @rule(finish=ANSWERS, share=st.floats(0, 1))
    def answer(self, finish: ChatFinish, share: float) -> None:
        if self.request.phase is not Phase.running:
            self.refused("answered", finish, 1)
        else:
            room = self.request.room or 0
            self.request = self.request.answered(finish, max(1, round(room * share)))
            self.answers += 1

    @rule(seconds=st.floats(0, 3))
    def tools(self, seconds: float) -> None:
        if self.request.phase is not Phase.calling_tools:
            self.refused("tools_returned", seconds)
        else:
            self.request = self.request.tools_returned(seconds)

    @precondition(lambda self: self.request.ended)
    @rule()
    def end(self) -> None:
        assert self.request.over

    @invariant()
    def limits_hold(self) -> None:
        limits, request = self.request.limits, self.request
        assert request.turns == self.answers <= limits.max_turns
        if request.phase is Phase.running:
            assert request.tokens < limits.max_context
            assert request.tool_s < limits.max_tool_s


TestLife = Life.TestCase
