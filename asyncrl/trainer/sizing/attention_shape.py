"""Sizes of the tensors that attention gathers in a micro-batch, by layout of the sequences; to estimate memory.

The sizes are those of the layout itself: `lay_out` and `blocks` lay out a micro-batch of whole groups, whose sequences
all have the greatest lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from asyncrl.trainer.batches.micro_batch_layout import WORTHWHILE, Block, Branches, Ints, blocks, lay_out


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of attention in a micro-batch, per token of its input.

    Attributes:
        queries: gathered queries.
        keys: gathered keys, and as many values: a shared prefix is gathered for each sequence.
        masked_pairs: pairs of query and key in masks, for the whole micro-batch; all layers share the masks.
    """

    queries: float = 1.0
    keys: float = 1.0
    masked_pairs: int = 0

    @classmethod
    def of(cls, made: list[Block[Ints]], tokens: int) -> Self:
        """Return the shape of a micro-batch of `tokens` input tokens with these blocks."""
        queries = sum(block.rows * (block.queries or block.width) for block in made)
        keys = sum(block.rows * block.width for block in made)
        masked = sum(block.pairs for block in made if block.queries is not None)
        return cls(queries / tokens, keys / tokens, masked)


def packed_shape(prompt: int, answer: int, group: int, budget: int, *, share: bool) -> AttentionShape:
    """Return the shape of packed micro-batches of at most `budget` tokens.

    Args:
        prompt: tokens of a prompt.
        answer: tokens that go into the model, of each of the `group` answers.
        share: prefixes are shared if that saves enough.
    """
    length = prompt + answer
    if share:
        members = max(1, min(group, (budget - prompt) // max(answer, 1)))
        groups = max(1, budget // (prompt + members * answer))
        shared = np.tile(np.array([0] + [prompt] * (members - 1), dtype=np.int64), groups)
        tree = Branches(np.arange(len(shared)), np.full(len(shared), length, dtype=np.int64), shared)
        if tree.tokens <= WORTHWHILE * length * len(shared):
            return AttentionShape.of(lay_out(tree).blocks, tree.tokens)
    lengths = [length] * max(1, budget // length)
    return AttentionShape.of(blocks(lengths), sum(lengths))
