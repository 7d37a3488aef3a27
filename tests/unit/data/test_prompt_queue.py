"""The order in which prompts are handed out follows from what is used and live, and from nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.prompt_queue import DataOrder, NextTry, PromptQueue, UsedPrompts
from tests.examples import examples


def run_without_lag(
    timing: random.Random, rows: int, batch: int, rejected: float
) -> tuple[list[list[int]], list[NextTry]]:
    """Steps at η = 0, and what was played for them.

    Ends come in any order; what they are depends on the attempt and the step alone, as seeds and weights do.
    """
    queue = PromptQueue(rows)
    batches, played = [], []
    for step in range(6):
        running: list[NextTry] = []
        kept: list[NextTry] = []
        while len(kept) < batch:
            if len(kept) + len(running) < batch and timing.random() < 0.5:
                running.append(queue.next())
            elif running:
                turn = running.pop(timing.randrange(len(running)))
                played.append(turn)
                if random.Random(f"{turn}/{step}").random() >= rejected:
                    kept.append(turn)
                    continue
                if turn.attempt >= 2:
                    queue.use(turn.order)
                else:
                    queue.leave(turn._replace(attempt=turn.attempt + 1))
        for turn in kept:
            queue.use(turn.order)
        batches.append(sorted(turn.order for turn in kept))
    return batches, sorted(played)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(), st.integers(), st.integers(4, 12), st.integers(1, 4), st.sampled_from([0.0, 0.3]))
def test_without_lag_batches_do_not_depend_on_when_rollouts_end(
    one: int, other: int, rows: int, batch: int, rejected: float
) -> None:
    found = run_without_lag(random.Random(one), rows, batch, rejected)
    assert found == run_without_lag(random.Random(other), rows, batch, rejected)
    if not rejected:  # as in the reference loop
        assert found[0] == [list(range(step * batch, (step + 1) * batch)) for step in range(6)]


MOVES = st.lists(
    st.tuples(st.sampled_from(["next", "same", "later", "failed", "use", "adopt"]), st.integers(0, 99)),
    min_size=20,
    max_size=80,
)


@settings(max_examples=examples(300), deadline=None)
@given(MOVES)
def test_a_prompt_waits_if_and_only_if_it_is_neither_used_nor_live(moves: list[tuple[str, int]]) -> None:
    """And a queue made of what is used and of the tries of what waits hands out the same prompts as this one."""
    queue, live, used, tries = PromptQueue(6), list[NextTry](), set[int](), dict[int, NextTry]()
    highest = -1
    for move, pick in moves:
        if move == "next":
            live.append(queue.next())
            highest = max(highest, live[-1].order)
            assert live[-1] == tries.pop(live[-1].order, NextTry(live[-1].order))
        elif move == "adopt":  # another manager had chosen it, whatever its place is here
            turn = NextTry(pick % (highest + 3))
            if turn.order not in used and turn.order not in {each.order for each in live}:
                queue.enter(turn.order)
                live.append(turn)
                tries.pop(turn.order, None)
                highest = max(highest, turn.order)
        elif live:
            turn = live.pop(pick % len(live))
            if move == "use":
                queue.use(turn.order)
                used.add(turn.order)
                continue
            again = NextTry(turn.order, turn.attempt + (move == "later"), turn.failures + (move == "failed"))
            queue.leave(again)
            tries[turn.order] = again
    assert all(queue.is_used(order) == (order in used) for order in range(highest + 8))
    made_anew = PromptQueue(6, used, {order: turn[1:] for order, turn in tries.items()})
    for turn in live:
        made_anew.enter(turn.order)
    upcoming = [[each.next() for _ in range(12)] for each in (queue, made_anew)]
    assert upcoming[0] == upcoming[1]
    assert not {turn.order for turn in upcoming[0]} & (used | {turn.order for turn in live})


def test_what_comes_back_is_next_and_another_attempt_waits_for_the_end_of_its_epoch() -> None:
    queue = PromptQueue(3)
    first, second = queue.next(), queue.next()
    queue.leave(first._replace(attempt=1))
    queue.leave(second)
    assert [queue.next() for _ in range(4)] == [second, NextTry(2), NextTry(0, attempt=1), NextTry(3)]


def test_a_prompt_that_may_not_be_begun_now_keeps_its_place() -> None:
    queue = PromptQueue(3)
    first, second = queue.next(), queue.next()
    queue.leave(first)
    queue.leave(second)
    assert queue.peek(lambda order: order != 0) == second
    assert queue.peek(lambda order: order > 1) == NextTry(2)
    assert queue.next() == first


def test_nothing_is_remembered_of_prompts_that_are_done() -> None:
    queue = PromptQueue(100)
    for _ in range(1000):
        turn = queue.next()
        queue.use(turn.order)
    assert (queue._used, queue.back, queue.live) == (set(), {}, set())


@pytest.mark.parametrize("count", [0, 1, 25])
def test_the_orders_of_used_prompts_are_those_of_their_ids(count: int) -> None:
    order = DataOrder(10, seed=3)
    chosen = random.Random(1).sample(range(40), count)
    used = UsedPrompts(order.ref(each).prompt_id for each in chosen)
    assert order.orders_of(used).tolist() == sorted(chosen)


def test_a_queue_with_an_end_begins_nothing_beyond_it_and_then_tries_again_at_once_what_waits() -> None:
    queue = PromptQueue(4, end=4)
    assert [queue.next().order for _ in range(4)] == [0, 1, 2, 3]
    assert queue.peek() is None, "all are live"
    queue.use(1)
    queue.leave(NextTry(0, attempt=2))
    assert queue.next() == NextTry(0, attempt=2), "without an end its place would be after two more epochs"
    for order in (0, 2, 3):
        queue.use(order)
    assert queue.peek() is None
    assert all(map(queue.is_used, range(4)))
    later = PromptQueue(4, range(4), end=6)
    assert [later.next().order for _ in range(2)] == [4, 5]
    assert later.peek() is None
