"""An answer ends with the token that completes a stop string, wherever the string lies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.chat.template import before_stop
from asyncrl.data.stop_strings import check_stop_strings, completed_by_last, kept_tokens
from asyncrl.data.tokenizers import ChatTokenizer
from tests.examples import examples

LETTERS = "ab</>\u00e9\u4f60\U0001f600"
TEXT = st.text(st.sampled_from(LETTERS), min_size=1, max_size=12)


def as_bytes(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


def first_with(ids: Sequence[int], strings: Sequence[str]) -> int | None:
    """By definition: the shortest beginning of the answer that holds one of the strings."""
    return next((n for n in range(1, len(ids) + 1) if any(s in as_bytes(ids[:n]) for s in strings)), None)


@settings(max_examples=examples(300))
@given(text=TEXT, strings=st.lists(TEXT.map(lambda text: text[:4]), min_size=1, max_size=3), drop=st.integers(0, 3))
def test_the_first_token_that_completes_a_string_is_the_last_kept(text: str, strings: list[str], drop: int) -> None:
    """Also where a character is split over tokens and the answer ends or begins within one."""
    ids = list(text.encode())[drop:]
    expected = first_with(ids, strings)
    assert kept_tokens(ids, strings, as_bytes) == expected
    stepwise = (n for n in range(1, len(ids) + 1) if completed_by_last(ids[:n], strings, as_bytes) is not None)
    assert next(stepwise, None) == expected


def test_a_string_spelled_in_bytes_is_found_at_its_last_byte() -> None:
    ids = list("x\u4f60\u597d\u4f60\u597d!".encode())
    assert kept_tokens(ids, ["\u4f60\u597d\u4f60\u597d"], as_bytes) == len(ids) - 1
    assert completed_by_last(ids[:-1], ["\u4f60\u597d\u4f60\u597d"], as_bytes) == "\u4f60\u597d\u4f60\u597d"
    assert completed_by_last(ids[:-2], ["\u4f60\u597d\u4f60\u597d"], as_bytes) is None


def test_a_special_token_is_text_to_stop_at(tokenizer: ChatTokenizer) -> None:
    ids = [*tokenizer.encode("What is"), *tokenizer.encode("<|im_end|>"), *tokenizer.encode(" more")]
    assert kept_tokens(ids, ["<|im_end|>"], tokenizer.decode_all) == len(tokenizer.encode("What is")) + 1
    assert kept_tokens(ids, ["is more"], tokenizer.decode_all) is None


def test_text_ends_before_the_string_that_comes_first() -> None:
    assert before_stop("ab</c>d", ["d", "</c>"]) == "ab"
    assert before_stop("ab", ["c"]) == "ab"


@pytest.mark.parametrize("string", ["", "a\ufffd"])
def test_strings_that_no_text_holds_are_refused(string: str) -> None:
    with pytest.raises(ValueError, match="stop string"):
        check_stop_strings(["x", string])
