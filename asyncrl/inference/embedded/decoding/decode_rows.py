"""State of the decode batch by row, as tensors, so that a step runs no Python per sample.

A row is a sample. Its slot of the KV cache is not known here (`slots`). The tokens of a sample are written to a column
of the output buffers, which it keeps while its row may change. One more column receives the tokens of empty rows. The
buffers are indexed `[output position, column]` and addressed flat: the next output position is one addition for all
rows, and a longer buffer leaves every index valid.

Shapes: R = rows in use, N = most rows, T = output positions, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Collection

import torch
from torch import Tensor

from asyncrl.inference.embedded.decoding.sequence import Sequence
from asyncrl.inference.embedded.model.sampling import RowSampling, sample, signed_64, uniforms_TR

POSITION, OUTPUT, LAST_OUTPUT, FIRST_STOP, TOKEN, TOP_K, DELTA = range(7)
"""Rows of the integer state: position of the token being decoded, flat output index it leads to, flat index of the last
token allowed, flat index from which stop tokens count, the token itself, top-k, what is added to the place of a token
to give its position (of models with three positions a token)."""
INVERSE_TEMPERATURE, TOP_P, MIN_P = range(3)
NO_STOP = -1
IDLE_STEPS = 4
"""Most decode steps that the row of a sample that has left keeps running empty, until the batch is reorganised."""


class RowTable:
    """State of at most `max_rows` running samples of a model with `vocab_size` tokens."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows, self._vocab_size, self._device = max_rows, vocab_size, device
        self._ints = torch.zeros(7, max_rows, dtype=torch.long, device=device)
        self._floats = torch.zeros(3, max_rows, device=device)
        self._stops = torch.full((max_rows, 1), NO_STOP, dtype=torch.long, device=device)
        self._stride = max_rows + 1
        self._tokens = torch.zeros(IDLE_STEPS, self._stride, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(IDLE_STEPS, self._stride, device=device)
        self._uniforms = torch.zeros(IDLE_STEPS, self._stride, dtype=torch.float64, device=device)
        self._advance = torch.tensor([[1], [self._stride]], device=device)
        self._idle_state = torch.tensor([[0], [max_rows], [-1], [0], [0], [vocab_size], [0]], device=device)
        self._columns = list(range(max_rows))
        self._sampling: RowSampling | None = None
        self._minimum_lengths = False

    def take_column(self) -> int:
        """Reserve an output column."""
        return self._columns.pop()

    def release_columns(self, columns: list[int]) -> None:
        """Release output columns; their rows must have been idled or reused."""
        self._columns += columns

    def idle(self, rows: list[int]) -> None:
        """Let rows run empty: at position 0, writing to the spare output column, never finishing by length."""
        self._ints[:, self._tensor(rows)] = self._idle_state

    def join(self, sequences: list[Sequence]) -> None:
        """Write the state of samples that enter the batch; each knows its row and column."""
        self._grow(sequences)
        rows = self._tensor([sequence.row for sequence in sequences])
        n = self._stride
        ints, floats = [], []
        for sequence in sequences:
            spec = sequence.request.sampling
            done, column = len(sequence.tokens), sequence.column
            ints.append(
                (
                    len(sequence.prefix),
                    done * n + column,
                    (spec.max_new_tokens - 1) * n + column,
                    spec.min_new_tokens * n,
                    sequence.last_token,
                    spec.top_k if 0 < spec.top_k < self._vocab_size else self._vocab_size,
                    sequence.delta,
                )
            )
            floats.append((1.0 / spec.temperature if spec.temperature > 0.0 else 1.0, spec.top_p, spec.min_p))
        self._ints[:, rows] = self._tensor(ints).T
        self._floats[:, rows] = torch.tensor(floats, device=self._device).T
        width = self._stops.shape[1]
        stops = [(*s.request.sampling.stop_token_ids, *[NO_STOP] * width)[:width] for s in sequences]
        self._stops[rows] = self._tensor(stops)
        self._restore_outputs(sequences)

    def _restore_outputs(self, sequences: list[Sequence]) -> None:
        """Fill the columns: the random numbers of the stream, and the earlier output of a retracted sample."""
        columns = self._tensor([sequence.column for sequence in sequences])
        length = max(sequence.request.sampling.max_new_tokens for sequence in sequences)
        seeds = self._tensor([signed_64(sequence.seed) for sequence in sequences])
        offsets = self._tensor([sequence.request.sampling.seed_offset for sequence in sequences])
        self._uniforms[:length, columns] = uniforms_TR(seeds, offsets, length)
        for sequence in sequences:
            if done := len(sequence.tokens):
                self._tokens[:done, sequence.column] = self._tensor(sequence.tokens)
                self._logprobs[:done, sequence.column] = torch.tensor(sequence.logprobs, device=self._device)

    def _grow(self, sequences: list[Sequence]) -> None:
        length = max(sequence.request.sampling.max_new_tokens for sequence in sequences)
        missing = length - self._tokens.shape[0]
        if missing > 0:
            self._tokens = torch.cat((self._tokens, self._tokens.new_zeros(missing, self._stride)))
            self._logprobs = torch.cat((self._logprobs, self._logprobs.new_zeros(missing, self._stride)))
            self._uniforms = torch.cat((self._uniforms, self._uniforms.new_zeros(missing, self._stride)))
        stops = max(len(sequence.request.sampling.stop_token_ids) for sequence in sequences)
        if stops > self._stops.shape[1]:
            padding = self._stops.new_full((self._max_rows, stops - self._stops.shape[1]), NO_STOP)
            self._stops = torch.cat((self._stops, padding), dim=1)

    def _tensor(self, values: Collection[int] | Collection[Collection[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def move(self, targets: Tensor, sources: Tensor) -> None:
        """Copy the state of rows `sources` to rows `targets`."""
        self._ints[:, targets] = self._ints[:, sources]
        self._floats[:, targets] = self._floats[:, sources]
        self._stops[targets] = self._stops[sources]

    def refresh(self, running: list[Sequence]) -> None:
        """Update what holds for the whole batch, after samples joined, left or moved."""
        specs = [sequence.request.sampling for sequence in running]
        rows = len(specs)
        greedy = [spec.temperature == 0.0 for spec in specs]
        filtered = [
            spec.temperature > 0.0 and (spec.top_p < 1.0 or spec.top_k > 0 or spec.min_p > 0.0) for spec in specs
        ]
        tempered = any(spec.temperature not in (0.0, 1.0) for spec in specs)
        self._sampling = RowSampling(
            inverse_temperature=self._floats[INVERSE_TEMPERATURE, :rows] if tempered else None,
            greedy=torch.tensor(greedy, device=self._device) if any(greedy) else None,
            filtered=torch.tensor(filtered, device=self._device) if any(filtered) else None,
            top_p=self._floats[TOP_P, :rows],
            top_k=self._ints[TOP_K, :rows],
            min_p=self._floats[MIN_P, :rows],
            all_greedy=all(greedy),
            forbidden=self._forbidden([spec.allowed_token_ids for spec in specs]),
        )
        self._minimum_lengths = any(spec.min_new_tokens > 0 for spec in specs)

    def _forbidden(self, allowed: list[tuple[int, ...]]) -> Tensor | None:
        """Return the tokens that rows with these allowed tokens may not sample, as `RowSampling.forbidden`."""
        masks = dict.fromkeys(allowed)
        if masks.keys() <= {()}:
            return None
        made = {}
        for ids in masks:
            mask_V = torch.full((self._vocab_size,), bool(ids), device=self._device)
            made[ids] = mask_V.index_fill_(0, self._tensor(ids), False)
        return next(iter(made.values()))[None] if len(made) == 1 else torch.stack([made[ids] for ids in allowed])

    def positions(self, rows: int) -> Tensor:
        """Positions `[R]` of the tokens being decoded."""
        return self._ints[POSITION, :rows]

    def deltas(self, rows: int) -> Tensor:
        """Return the difference between the positions of the rotary embedding and `positions`, `[R]`."""
        return self._ints[DELTA, :rows]

    def inputs(self, rows: int) -> Tensor:
        """Tokens `[R]` being decoded."""
        return self._ints[TOKEN, :rows]

    def advance(self, logits_RV: Tensor, rows: int) -> Tensor:
        """Sample every row's next token, record it and move on.

        Returns:
            bool `[R]`: rows that are finished, by a stop token or by length.
        """
        assert self._sampling is not None
        ints = self._ints[:, :rows]
        output = ints[OUTPUT]
        stops = self._stops[:rows]
        if self._minimum_lengths:
            self._suppress_stops(logits_RV, output, stops)
        tokens, logprobs = sample(logits_RV, self._uniforms.view(-1).index_select(0, output), self._sampling)
        self._tokens.view(-1).index_copy_(0, output, tokens)
        self._logprobs.view(-1).index_copy_(0, output, logprobs)
        stopped = stops[:, 0] == tokens if stops.shape[1] == 1 else (stops == tokens[:, None]).any(1)
        finished = stopped.logical_or_(output == ints[LAST_OUTPUT])
        ints[TOKEN].copy_(tokens)
        ints[: OUTPUT + 1].add_(self._advance)
        return finished

    def _suppress_stops(self, logits_RV: Tensor, output: Tensor, stops: Tensor) -> None:
        early = (output < self._ints[FIRST_STOP, : len(output)])[:, None] & (stops >= 0)
        rows, columns = early.nonzero(as_tuple=True)
        logits_RV[rows, stops[rows, columns]] = -torch.inf

    def read(self, columns: list[int], length: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the first `length` tokens and log-probabilities of output columns, as lists."""
        index = self._tensor(columns)
        tokens: list[list[int]] = self._tokens[:length].index_select(1, index).T.tolist()
        logprobs: list[list[float]] = self._logprobs[:length].index_select(1, index).T.tolist()
        return tokens, logprobs
