"""The state of running samples: a row whose sample has left writes into no other sample's output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from asyncrl.inference.embedded.jobs import Sequence
from asyncrl.inference.embedded.rows import RowTable
from asyncrl.inference.engine_io import SamplingSpec

VOCAB = 10


def running(row: int, *earlier: int) -> Sequence:
    """A greedy sample in `row`, which has `earlier` tokens already."""
    sampling = SamplingSpec(max_new_tokens=4, temperature=0.0)
    partial = SimpleNamespace(tokens=[*earlier], logprobs=[-1.0] * len(earlier))
    fields = {"seed": 1, "prefix": (1,), "last_token": 1, "delta": 0, "column": -1}
    return cast(
        Sequence, SimpleNamespace(request=SimpleNamespace(sampling=sampling), partial=partial, row=row, **fields)
    )


def decode(table: RowTable, tokens: list[int]) -> None:
    """One step, in which each row's likeliest token is that of `tokens`."""
    logits = torch.zeros(len(tokens), VOCAB)
    logits[range(len(tokens)), tokens] = 5.0
    table.advance(logits, len(tokens))


def test_a_sample_may_have_the_column_of_one_that_left_while_that_ones_row_still_runs_empty() -> None:
    table: Any = RowTable(3, VOCAB, torch.device("cpu"))
    first, second, third = running(0), running(1), running(2, 2, 3)  # the third was retracted
    table.join([first, second])
    table.refresh([first, second])
    decode(table, [3, 4])
    left = first.column
    table.leave([first])
    table.join([third])
    assert third.column == left
    table.refresh([first, second, third])
    decode(table, [9, 5, 6])
    decode(table, [9, 7, 8])
    tokens, _ = table.read([second.column, third.column], 4)
    assert (tokens[0][:3], tokens[1]) == ([4, 5, 7], [2, 3, 6, 8])
