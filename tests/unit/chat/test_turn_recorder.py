"""Which recorded conversation a call continues, and what becomes of answers that nobody received."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asyncrl.api import ChatFinish, ChatReply, Completion, FinishReason
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.chat.conversation import Turn, TurnRecorder

BLACK, WHITE = (Picture.from_array(np.full((2, 2, 3), shade, np.uint8)) for shade in (0, 255))
USER: dict[str, Any] = {"role": "user", "content": "a"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "b"}


def made(
    given: Sequence[int],
    sampled: Sequence[int],
    parent: Turn | None = None,
    finish: FinishReason = FinishReason.stop,
    **more: Any,
) -> Turn:
    completion = Completion([*sampled], [-0.5] * len(sampled), [3] * len(sampled), finish)
    return Turn(parent, tuple(given), completion, **more)


def spoken(messages: Sequence[dict[str, Any]], answer: dict[str, Any], parent: Turn | None = None) -> Turn:
    reply = ChatReply(answer, answer["content"], None, (), 0, ChatFinish.stop, (), made([], []).completion)
    return made([1], [2], parent, messages=tuple(messages), reply=reply)


def recorded(*turns: Turn) -> TurnRecorder:
    recorder = TurnRecorder()
    for turn in turns:
        recorder.add(turn)
    return recorder


def test_token_ids_continue_the_longest_recorded_conversation_that_they_begin_with() -> None:
    first = made([1, 2], [3])
    second = made([4], [5, 6], first)
    recorder = recorded(first, second)
    for ids, found in (
        ([1, 2], None),
        ([1, 2, 3], first),
        ([1, 2, 3, 4, 5], first),
        ([1, 2, 3, 4, 5, 6], second),
        ([1, 2, 3, 4, 5, 6, 7], second),
        ([1, 2, 3, 9, 5, 6, 7], first),
        ([0, 2, 3], None),
    ):
        assert recorder.find_ids(ids) is recorded(second, first).find_ids(ids) is found, ids


def test_pictures_count_with_the_tokens_that_they_stand_at() -> None:
    shown = made([1, 0, 0], [3], given_pictures=(PlacedPicture(1, 2, BLACK),))
    recorder = recorded(shown)
    ids, black = [1, 0, 0, 3, 0, 0, 5], PlacedPicture(1, 2, BLACK)
    assert recorder.find_ids(ids, [black]) is shown
    assert recorder.find_ids(ids, [black, PlacedPicture(4, 2, WHITE)]) is shown, "it stands behind the answer"
    for other in ([], [PlacedPicture(1, 2, WHITE)], [PlacedPicture(1, 1, BLACK)], [PlacedPicture(2, 1, BLACK)]):
        assert recorder.find_ids(ids, other) is None


def test_messages_continue_the_conversation_that_they_begin_with() -> None:
    first = spoken([USER], ANSWER)
    second = spoken([{**USER, "content": "c"}], {**ANSWER, "content": "d"}, first)
    recorder = recorded(first, second)
    whole = [USER, ANSWER, {**USER, "content": "c"}, {**ANSWER, "content": "d"}]
    assert recorder.find([*whole, USER]) == (second, 4)
    assert recorder.find(whole[:3]) == (first, 2)
    assert recorder.find([USER]) == recorder.find([USER, {**ANSWER, "content": "x"}]) == (None, 0)
    assert recorder.find(whole, [{"type": "function", "function": {"name": "f", "parameters": {}}}]) == (None, 0)


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"content": None}, True),
        ({"refusal": None}, True),
        ({"content": " "}, False),
        ({"name": "ann"}, False),
        ({"tool_call_id": "c1"}, False),
        ({"role": "system"}, False),
    ],
)
def test_a_message_is_the_same_where_what_counts_of_it_is(changed: dict[str, Any], same: bool) -> None:
    empty = {"role": "user", "content": ""}
    turn = spoken([empty], ANSWER)
    assert recorded(turn).find([{**empty, **changed}, ANSWER]) == ((turn, 2) if same else (None, 0))
    assert recorded(turn).find([empty, {**ANSWER, "name": "agent"}]) == (turn, 2)


def test_arguments_are_the_same_in_any_order_of_keys_and_as_text() -> None:
    def calling(arguments: Any) -> dict[str, Any]:
        return {**ANSWER, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}

    turn = spoken([USER], calling({"a": 1, "b": {"c": 2, "d": 3}}))
    recorder = recorded(turn)
    for same in ({"b": {"d": 3, "c": 2}, "a": 1}, '{"b": {"c": 2, "d": 3},  "a": 1}'):
        assert recorder.find([USER, calling(same)]) == (turn, 2)
    for other in ({"a": 1}, "{not json", {"a": 1, "b": {"c": 2, "d": 4}}):
        assert recorder.find([USER, calling(other)]) == (None, 0)
    unread = spoken([USER], calling("{not json"))
    assert recorded(unread).find([USER, calling("{not json")]) == (unread, 2)


def test_half_of_a_surrogate_pair_in_a_message_is_compared_like_other_text() -> None:
    turn = spoken([{**USER, "content": "\ud83d"}], ANSWER)
    assert recorded(turn).find([{**USER, "content": "\ud83d"}, ANSWER]) == (turn, 2)


def test_of_two_equal_conversations_the_newer_one_is_continued() -> None:
    old, new = spoken([USER], ANSWER), spoken([USER], ANSWER)
    recorder = recorded(old, new)
    assert recorder.find([USER, ANSWER]) == (new, 2)
    assert recorder.find_ids(new.ids) is new


def test_an_answer_that_nobody_received_is_forgotten_unless_it_is_continued() -> None:
    first = spoken([USER], ANSWER)
    second = made([7], [8], first)
    recorder = recorded(first, second)
    recorder.forget(first.completion)
    assert recorder.turns == [first, second]
    recorder.forget(second.completion)
    recorder.forget(second.completion)
    assert recorder.turns == [first]
    assert recorder.find_ids(second.ids) is first
    recorder.forget(first.completion)
    assert (recorder.turns, recorder.find([USER, ANSWER]), recorder.find_ids(first.ids)) == ([], (None, 0), None)


def test_a_limit_is_recorded_once_at_each_place_and_cuts_off_the_branch_that_ends_there() -> None:
    first, other = made([1], [2]), made([1], [3])
    recorder = recorded(first, other)
    assert recorder.cut_off(first, 9)
    assert not recorder.cut_off(first, 9)
    assert recorder.cut_off(first, 10)
    assert recorder.cut_off(None, 9)
    assert [sample.truncated for sample in recorder.samples(1.0)] == [True, False]


def test_a_limit_cuts_off_nothing_if_an_answer_follows_elsewhere() -> None:
    first, summary = made([1], [2]), made([1, 7], [3])
    recorder = recorded(first)
    recorder.cut_off(first, 9)
    recorder.add(summary)
    assert [sample.truncated for sample in recorder.samples(1.0)] == [False, False]
    recorder.forget(summary.completion)
    assert [sample.truncated for sample in recorder.samples(1.0)] == [True], "the program never received it"
    recorder.add(summary)
    recorder.cut_off(first, 9)
    assert [sample.truncated for sample in recorder.samples(1.0)] == [True, False], "it has gone back to it"


@pytest.mark.parametrize("ended", ["well", "cut", "at a limit"])
def test_a_sample_is_truncated_if_what_followed_it_untrained_was_cut_off(ended: str) -> None:
    finish = FinishReason.length if ended == "cut" else FinishReason.stop
    first = made([1], [2], finish=FinishReason.stop if ended == "cut" else FinishReason.length)
    aside, inner = made([3], [4], first), made([5], [6], first)
    last = made([7], [], inner, finish)
    recorder = recorded(first, inner, aside, last)
    recorder.leave_untrained([aside.completion, inner.completion])
    if ended == "at a limit":
        recorder.cut_off(inner, 9)
    (sample,) = recorder.samples(1.0)
    assert sample.truncated == (ended != "well")


def test_a_branch_without_sampled_tokens_is_no_sample_and_later_ones_keep_their_order() -> None:
    first = made([1], [2])
    silent, later, early = made([3], [], first), made([4], [5], first), made([6], [7])
    samples = recorded(early, first, later, silent).samples(0.5)
    assert [sample.tokens.tolist() for sample in samples] == [[6, 7], [1, 2, 4, 5]]
    assert [sample.loss_mask.tolist() for sample in samples] == [[0, 1], [0, 1, 0, 1]]
    assert [sample.versions.tolist() for sample in samples] == [[-1, 3], [-1, 3, -1, 3]]


TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def kept_of(recorder: TurnRecorder) -> list[int]:
    """The last token of each sample, if answers that were thrown away are dropped."""
    return [int(sample.tokens[-1]) for sample in recorder.samples(1.0, drop_repeated=True)]


def test_an_answer_is_thrown_away_if_the_same_is_asked_again_after_it_and_no_call_continues_it() -> None:
    def answer(token: int) -> Turn:
        reply = ChatReply(ANSWER, "b", None, (), 0, ChatFinish.stop, (), made([], []).completion)
        return made([1], [token], messages=(USER,), reply=reply)

    first, at_once, again, elsewhere = answer(2), answer(3), answer(4), answer(5)
    recorder = TurnRecorder()
    assert not recorder.add(first, since=0)
    assert not recorder.add(at_once, since=0), "it was asked before the first was answered"
    assert not recorder.add(elsewhere, TOOLS, since=2), "it offers tools"
    assert kept_of(recorder) == [2, 3, 5]
    assert recorder.add(again, since=3)
    assert kept_of(recorder) == [5, 4]
    assert len(recorder.samples(1.0)) == 4
    recorder.continued.add(first)
    assert kept_of(recorder) == [2, 5, 4]
    recorder.forget(again.completion)
    assert kept_of(recorder) == [2, 3, 5], "what nobody received has replaced nothing"
    assert recorder.add(answer(6), since=recorder.recorded)
    recorder.forget(at_once.completion)
    assert not recorder.add(answer(7), since=2), "of what had been answered then, one was continued and one forgotten"


def test_ids_that_are_asked_again_are_the_same_with_the_same_pictures() -> None:
    shown = [
        made([1, 0], [token], given_pictures=(PlacedPicture(1, 1, shade),)) for token, shade in ((2, BLACK), (3, WHITE))
    ]
    recorder = TurnRecorder()
    assert not any(recorder.add(turn, since=recorder.recorded) for turn in shown)
    assert recorder.add(made([1, 0], [4], given_pictures=(PlacedPicture(1, 1, BLACK),)), since=2)
    assert kept_of(recorder) == [3, 4]


def test_untrained_answers_are_context_and_end_no_sample() -> None:
    first = made([1], [2])
    inner, leaf, alone = made([3], [4], first), made([5], [6], first), made([7], [8])
    recorder = recorded(alone, leaf, first, inner, made([9], [10], inner))
    assert recorder.leave_untrained([inner.completion, leaf.completion, alone.completion])
    assert not recorder.leave_untrained([made([1], [2]).completion])
    (sample,) = recorder.samples(1.0)
    assert sample.tokens.tolist() == [1, 2, 3, 4, 9, 10]
    assert sample.loss_mask.tolist() == [0, 1, 0, 0, 0, 1]


def test_an_answer_without_a_token_takes_no_loss_from_those_before_it() -> None:
    first = made([1], [2])
    silent = made([3], [], first)
    again = made([4], [], silent)
    (sample,) = recorded(first, silent, again).samples(0.5)
    assert (sample.tokens.tolist(), sample.loss_mask.tolist()) == ([1, 2], [0, 1])
    (sample,) = recorded(first, silent, again, made([5], [6], again)).samples(0.5)
    assert (sample.tokens.tolist(), sample.loss_mask.tolist()) == ([1, 2, 3, 4, 5, 6], [0, 1, 0, 0, 0, 1])
