"""Positions of the tokens of a prompt with pictures, in three dimensions: time, height and width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def positions(
    length: int, spans: Sequence[tuple[int, int]], grids: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int64], int]:
    """Return the positions [3, `length`] of Qwen-VL's and GLM-4V's models (M-RoPE, arXiv 2409.12191, section 2.1).

    Pictures are where the caller says. SGLang and transformers search for them by token ids, and so take a placeholder
    that the policy sampled for a picture.

    Args:
        length: tokens of the prompt.
        spans: first token and number of tokens of each picture, in order.
        grids: rows and columns of tokens of each picture.

    Returns:
        The positions, and what has to be added to the number of a token after the prompt to get its position.

    Raises:
        ValueError: a span is outside of the prompt, meets another, or has not as many tokens as its grid.
    """
    found = np.empty((3, length), np.int64)
    at = next_position = 0  # the next token, and its position
    for (first, count), (rows, columns) in zip(spans, grids, strict=True):
        if not at <= first <= first + count <= length:
            raise ValueError(f"a picture is at tokens {first} to {first + count} of {length}, not behind token {at}")
        if count != rows * columns:
            raise ValueError(f"a picture has {rows} x {columns} tokens, and its span {count}")
        found[:, at:first] = next_position + np.arange(first - at)
        next_position += first - at
        found[0, first : first + count] = next_position
        found[1, first : first + count] = next_position + np.repeat(np.arange(rows), columns)
        found[2, first : first + count] = next_position + np.tile(np.arange(columns), rows)
        at, next_position = first + count, next_position + max(rows, columns)
    found[:, at:] = next_position + np.arange(length - at)
    return found, next_position - at
