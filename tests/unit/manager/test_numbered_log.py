"""Prompts given up are told until the master names their numbers."""

from __future__ import annotations

from asyncrl.manager.numbered_log import NumberedLog


def after(prompts: NumberedLog[str], seq: int) -> list[str]:
    prompts.forget(seq)
    return prompts.unrecorded


def test_a_prompt_is_told_until_its_number_is_named() -> None:
    prompts = NumberedLog[str](after=100)
    assert after(prompts, 0) == []
    prompts.add("a")
    prompts.add("b")
    assert after(prompts, 0) == ["a", "b"], "a lost reply loses none"
    assert prompts.last_seq == 102
    assert after(prompts, 0) == ["a", "b"]
    prompts.add("c")
    assert after(prompts, 102) == ["c"]
    assert after(prompts, 103) == []
    assert after(prompts, 102) == [], "forgotten"


def test_a_manager_that_was_restarted_tells_all_whatever_number_its_predecessor_came_to() -> None:
    prompts = NumberedLog[str](after=200)
    prompts.add("a")
    assert after(prompts, 102) == ["a"]
