"""Token ids as settings name them."""

from __future__ import annotations

import pytest

from asyncrl.config.setting import token_ids


@pytest.mark.parametrize(
    ("text", "ids"), [("", ()), (" ", ()), ("7", (7,)), ("31-33, 2", (2, 31, 32, 33)), ("5-5", (5,)), ("9,1", (1, 9))]
)
def test_ids_and_ranges_are_named_in_any_order(text: str, ids: tuple[int, ...]) -> None:
    assert token_ids(text) == ids


@pytest.mark.parametrize("text", ["5-3", "a", "1,,2", "-1", "1-3,2", "0-99999999", "1.5", "3,"])
def test_what_is_no_list_of_ids_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|twice"):
        token_ids(text)
