"""The choice of resting prompts follows from the newest measurements alone."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.plugins.datasets.queue.curriculum import Curriculum

MEASURED = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.floats(0, 1)), max_size=30)


def test_the_example_of_the_docstring() -> None:
    curriculum = Curriculum(0.1, 0.9, 2)
    curriculum.measured("e0-7", 1.0)
    assert [epoch for epoch in range(6) if curriculum.rests(f"e{epoch}-7")] == [1, 2]
    assert not curriculum.rests("e1-8"), "nothing is known of it"
    curriculum.measured("e3-7", 0.5)
    assert not any(curriculum.rests(f"e{epoch}-7") for epoch in range(6))


def test_the_bounds_themselves_are_within_and_an_older_epoch_replaces_nothing() -> None:
    curriculum = Curriculum(0.25, 0.75, 1)
    for row, success in enumerate((0.25, 0.75, 0.125, 0.875)):
        curriculum.measured(f"e2-{row}", success)
        curriculum.measured(f"e1-{row}", 0.5)
    assert [curriculum.rests(f"e3-{row}") for row in range(4)] == [False, False, True, True]
    assert not any(curriculum.rests(f"e4-{row}") for row in range(4))
    curriculum.measured("of my own stream", 1.0)
    assert not curriculum.rests("of my own stream")


@given(MEASURED)
def test_one_made_of_its_state_decides_as_it_does(measured: list[tuple[int, int, float]]) -> None:
    curriculum = Curriculum(0.2, 0.8, 2)
    for epoch, row, success in measured:
        curriculum.measured(f"e{epoch}-{row}", success)
    again = Curriculum(0.2, 0.8, 2, json.loads(json.dumps(curriculum.state())))
    ids = [f"e{epoch}-{row}" for epoch in range(10) for row in range(5)]
    assert [again.rests(each) for each in ids] == [curriculum.rests(each) for each in ids]
    assert again.state() == curriculum.state()
