"""Prompts given up are told until the master names their numbers."""

from __future__ import annotations

from asyncrl.manager.numbered_log import NumberedLog


def test_a_prompt_is_told_until_its_number_is_named() -> None:
    prompts = NumberedLog[str](after=100)
    assert prompts.after(0) == []
    prompts.add("a")
    prompts.add("b")
    assert prompts.after(0) == ["a", "b"], "a lost reply loses none"
    assert prompts.last_seq == 102
    assert prompts.after(0) == ["a", "b"]
    prompts.add("c")
    assert prompts.after(102) == ["c"]
    assert prompts.after(103) == []
    assert prompts.after(102) == [], "forgotten"


def test_a_manager_that_was_restarted_tells_all_whatever_number_its_predecessor_came_to() -> None:
    prompts = NumberedLog[str](after=200)
    prompts.add("a")
    assert prompts.after(102) == ["a"]
