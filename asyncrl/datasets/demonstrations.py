"""Batches of demonstrations for supervised training, tokenised; and the cut of any batch into padded micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncrl.api import Tokenizer
from asyncrl.datasets import DemonstrationDataset
from asyncrl.datasets.order import epoch_order


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt with the answer to imitate and the end token; `prompt_length` tokens of it carry no loss."""

    token_ids: list[int]
    prompt_length: int

    @property
    def answer_length(self) -> int:
        """Tokens that carry loss."""
        return len(self.token_ids) - self.prompt_length


def demonstration_batches(
    dataset: DemonstrationDataset, tokenizer: Tokenizer, *, batch_size: int, steps: int, seed: int
) -> Iterator[list[Demonstration]]:
    """`steps` batches of `batch_size` rows, epoch after epoch, each epoch in its own order of `seed`."""
    rows = _endless_rows(len(dataset), seed)
    for _ in range(steps):
        yield [_demonstration(dataset, next(rows), tokenizer) for _ in range(batch_size)]


def by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices 0 to `len(lengths)` - 1 in runs of similar length, each padded to at most `max_tokens` tokens.

    A sequence longer than that goes alone. Where losses are sums over a common normaliser the cut changes no result.
    """
    run: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if run and (len(run) + 1) * lengths[index] > max_tokens:
            yield run
            run = []
        run.append(index)
    if run:
        yield run


def _endless_rows(num_rows: int, seed: int) -> Iterator[int]:
    epoch = 0
    while True:
        yield from epoch_order(num_rows, seed, epoch).tolist()
        epoch += 1


def _demonstration(dataset: DemonstrationDataset, index: int, tokenizer: Tokenizer) -> Demonstration:
    row = dataset.row(index)
    prompt = tokenizer.encode(row["prompt"])
    answer = tokenizer.encode(dataset.demonstration(row))
    return Demonstration([*prompt, *answer, tokenizer.eos_token_id], len(prompt))
