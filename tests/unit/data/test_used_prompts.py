"""Used prompts are a set of ids that is small on disk, and is read back whole or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.prompt_queue import UsedPrompts, parse_prompt_id


@given(
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 5000))),
    st.sets(st.sampled_from(["x", "e01-2", "e1-", "e1-02"])),
)
def test_used_prompts_are_a_set_that_survives_json(pairs: set[tuple[int, int]], others: set[str]) -> None:
    expected = {f"e{epoch}-{row}" for epoch, row in pairs} | others
    used = UsedPrompts(expected)
    for prompt_id in expected:
        used.add(prompt_id)
    again = UsedPrompts.from_json(json.loads(json.dumps(used.to_json())))
    for one in (used, again):
        assert set(one) == expected
        assert len(one) == len(expected) == len(list(one))
        assert all(prompt_id in one for prompt_id in expected)
        assert "e9-1" not in one
        assert 3 not in one
    again.add("e3-70000")
    assert "e3-70000" in again


def test_a_finished_epoch_of_used_prompts_takes_next_to_nothing() -> None:
    used = UsedPrompts(f"e0-{row}" for row in range(50_000))
    assert len(json.dumps(used.to_json())) < 200


def test_damaged_used_prompts_are_refused() -> None:
    value = UsedPrompts(["e0-1", "e0-2"]).to_json()
    with pytest.raises(ValueError, match="2 ids where count says 3"):
        UsedPrompts.from_json(value | {"count": 3})


def test_ids_come_by_epoch_and_row_and_then_those_of_another_form() -> None:
    used = UsedPrompts(["e1-0", *"xdbcefa", "e0-17", "e0-8", "e0-7"])
    assert list(used) == ["e0-7", "e0-8", "e0-17", "e1-0", *"abcdefx"]
    assert used.to_json()["others"] == [*"abcdefx"]
    assert used.epochs == [0, 1]
    assert [used.rows(epoch).tolist() for epoch in (0, 1)] == [[7, 8, 17], [0]]


def test_only_an_id_of_epoch_and_row_has_a_place_in_a_bitmap() -> None:
    largest = (1 << 32) - 1
    assert parse_prompt_id(f"e3-{largest}") == (3, largest)
    assert parse_prompt_id(f"e3-{largest + 1}") is None, "a bitmap of half a gigabyte"
    for other in ("e01-2", "e1-02", "e1", "1-2", "e1-2-3", "xe1-2"):
        assert parse_prompt_id(other) is None


def test_what_is_added_after_it_was_written_is_written_next_time() -> None:
    used = UsedPrompts(["e0-1", "e1-1"])
    used.to_json()
    used.add("e0-9")
    again = UsedPrompts.from_json(used.to_json())
    assert list(again) == ["e0-1", "e0-9", "e1-1"]
    again.add("e1-1")
    assert len(again) == 3
    assert UsedPrompts.from_json(json.loads(json.dumps(again.to_json()))).to_json() == again.to_json()


@pytest.mark.parametrize(
    "damage",
    [
        {"epochs": {"0": "no base64"}},
        {"epochs": {"0": "AAAA"}},
        {"epochs": {"x": "eJwDAAAAAAE="}},
        {"epochs": []},
        {"others": None},
        {"count": "many"},
        {"count": 1},
    ],
    ids=str,
)
def test_a_damaged_set_is_refused(damage: dict[str, Any]) -> None:
    value = UsedPrompts(["e0-1", "x"]).to_json()
    with pytest.raises(ValueError, match="the file is damaged"):
        UsedPrompts.from_json(value | damage)
    with pytest.raises(ValueError, match="the file is damaged"):
        UsedPrompts.from_json({})
