"""Rows of a supervised run: load them, encode them now or on demand, and draw batches.

`demonstrations` and `preferences` convert a single row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from asyncrl.config.plugin_code.import_paths import PluginError
from asyncrl.plugins.datasets import DemonstrationDataset, Placed, load_dataset
from asyncrl.plugins.datasets.prompt_format import PromptFormat
from asyncrl.plugins.datasets.queue.order import epoch_order
from asyncrl.plugins.datasets.rows.readers import is_data_path
from asyncrl.plugins.datasets.supervised.demonstrations import BadDemonstration, Demonstration
from asyncrl.plugins.datasets.tokenizers import ChatTokenizer


class RowFormat(Protocol):
    """Conversion of rows to sequences."""

    @property
    def prompts(self) -> PromptFormat:
        """Tokenizer and chat template."""
        ...

    @property
    def sequences(self) -> int:
        """Most sequences of an ordinary row."""
        ...

    def encode(self, dataset: DemonstrationDataset, row: Mapping[str, Any]) -> list[Demonstration]:
        """Return the sequences of `row`.

        Raises:
            BadDemonstration: the row cannot be used.
        """
        ...


Rows = Sequence[Sequence[Demonstration]]
"""Demonstrations by row."""


class LazyRows(Sequence[list[Demonstration]]):
    """Rows of a dataset, encoded on demand: there may be very many, or their pictures may be large.

    Args:
        numbers: numbers of the rows; None for all of them.
    """

    def __init__(self, dataset: DemonstrationDataset, form: RowFormat, numbers: Sequence[int] | None = None) -> None:
        self._dataset, self._form = dataset, form
        self._numbers = range(len(dataset)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return LazyRows(self._dataset, self._form, self._numbers[index])
        return self._form.encode(self._dataset, self._dataset.row(self._numbers[index]))


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The encoded rows of a file, without those that are too long, and notes on them for the user."""

    rows: Rows
    notes: tuple[str, ...]

    @classmethod
    def of(cls, dataset: DemonstrationDataset, form: RowFormat, max_tokens: int) -> EncodedRows:
        """Encode all rows of `dataset`; rows with a sequence of more than `max_tokens` tokens are left out.

        Raises:
            BadDemonstration: there is nothing to imitate in a row, or all are too long; names file and line.
        """
        kept: list[list[Demonstration]] = []
        numbers, longest, several, tokens, learnt, shown = [], 0, 0, 0, 0, 0
        for number in range(len(dataset)):
            try:
                encoded = form.encode(dataset, dataset.row(number))
            except BadDemonstration as error:
                place = dataset.place(number) if isinstance(dataset, Placed) else f"row {number}"
                raise BadDemonstration(f"{place}: {error}") from None
            length = max(len(each.token_ids) for each in encoded)
            longest = max(longest, length)
            several += len(encoded) > form.sequences
            if length > max_tokens:
                continue
            numbers.append(number)
            learnt += sum(each.answer_length for each in encoded)
            tokens += sum(len(each.token_ids) for each in encoded)
            shown += len(encoded[-1].pictures)
            if not shown:  # rows with pictures are loaded again when they are used
                kept.append(encoded)
        too_long = len(dataset) - len(numbers)
        if not numbers:
            raise BadDemonstration(
                f"all {too_long} rows are longer than dataset.max_tokens={max_tokens} (up to {longest}); raise it"
            )
        notes = [f"{len(numbers)} rows of up to {longest} tokens; {learnt} of {tokens} tokens carry loss"]
        if shown:
            notes.append(f"{shown} pictures")
        if too_long:
            notes.append(f"{too_long} rows are longer than dataset.max_tokens={max_tokens} and left out")
        if several:
            notes.append(f"{several} conversations are several sequences: the template shows earlier turns otherwise")
        return cls(LazyRows(dataset, form, numbers) if shown else kept, tuple(notes))


def load_demonstrations(
    path: str, args: Mapping[str, Any], fields: Mapping[str, str], split: str, seed: int, *, judged: bool = False
) -> DemonstrationDataset:
    """Return one split of the dataset that a `dataset.path` of supervised training names.

    Args:
        judged: its rows have judged answers (`preferences`) in place of demonstrations.

    Raises:
        PluginError: as for `load_dataset`, or the class has no `demonstration` method.
    """
    if is_data_path(path):
        args = {**args, "demonstrations": True, "pairs": judged, **({"fields": dict(fields)} if fields else {})}
    dataset = load_dataset(path, args, split, seed)
    if not judged and not callable(getattr(dataset, "demonstration", None)):
        raise PluginError(f"{path!r}: {type(dataset).__name__} has no method demonstration(row) -> str; give it one")
    return cast(DemonstrationDataset, dataset)


def shown_with_loss(demonstration: Demonstration, tokenizer: ChatTokenizer) -> str:
    """Return the text of `demonstration`, with ⟦ and ⟧ around the parts that carry loss."""
    parts = []
    for learnt, group in itertools.groupby(
        zip(demonstration.token_ids, demonstration.loss_mask, strict=True), key=lambda pair: pair[1]
    ):
        text = tokenizer.decode_all([token for token, _ in group])
        parts.append(f"⟦{text}⟧" if learnt else text)
    return "".join(parts)


def demonstration_batches(
    rows: Rows, *, batch_size: int, steps: int, seed: int, begin: int = 0
) -> Iterator[list[Demonstration]]:
    """Yield batches `begin` to `steps` - 1 of `batch_size` rows' demonstrations, epoch after epoch.

    Each epoch has its own order, which follows from `seed`.
    """
    order = itertools.islice(_endless_rows(len(rows), seed), begin * batch_size, None)
    for _ in range(begin, steps):
        yield [demonstration for _ in range(batch_size) for demonstration in rows[next(order)]]


def _endless_rows(num_rows: int, seed: int) -> Iterator[int]:
    epoch = 0
    while True:
        yield from epoch_order(num_rows, seed, epoch).tolist()
        epoch += 1
