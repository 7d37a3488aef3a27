"""State of the decode batch by row, as tensors, so that a step runs no Python per sample.

A row is a sample. Its slot of the KV cache is not known here (`slots`). The tokens of a sample are written to an output
column, which it keeps while its row may change.

Shapes: R = rows in use, N = most rows, T = output positions, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Collection

import torch
from torch import Tensor

from asyncrl.inference.embedded.decoding.sequence import Sequence
from asyncrl.inference.embedded.model.sampling import RowSampling, sample, signed_64, uniforms_TR

POSITION, OUTPUT, LAST_OUTPUT, FIRST_STOP, TOKEN, TOP_K, DELTA = range(7)
"""Rows of the integer state:

    POSITION      position of the token being decoded
    OUTPUT        flat output index of the token that it leads to
    LAST_OUTPUT   flat output index of the last token allowed
    FIRST_STOP    flat output index from which stop tokens count
    TOKEN         the token being decoded
    TOP_K         top-k
    DELTA         number added to a token's place to give its position, of models with three positions per token
"""
INVERSE_TEMPERATURE, TOP_P, MIN_P = range(3)
NO_STOP = -1
IDLE_STEPS = 4
"""Most decode steps that the row of a sample that has left keeps running empty, until the batch is reorganised."""


class OutputColumns:
    """Tokens, log-probabilities and random numbers by output position, in a column for each of `most` samples.

    One more column receives the tokens of empty rows. The buffers are indexed `[output position, column]` and addressed
    flat: the next output position is one addition for all rows, and a longer buffer leaves every index valid.

    Attributes:
        stride: difference between the flat indices of two output positions of a column.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.stride = most + 1
        self._tokens = torch.zeros(IDLE_STEPS, self.stride, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(IDLE_STEPS, self.stride, device=device)
        self._uniforms = torch.zeros(IDLE_STEPS, self.stride, dtype=torch.float64, device=device)
        self._free = list(range(most))
        self._spent: list[int] = []

    def take(self) -> int:
        """Reserve a column."""
        return self._free.pop()

    def leave(self, columns: list[int]) -> None:
        """Mark columns whose samples have left, for the next `reclaim`."""
        self._spent += columns

    def reclaim(self) -> None:
        """Release the columns that samples have left. No row may write to them any more."""
        self._free += self._spent
        self._spent = []

    def begin(self, sequences: list[Sequence]) -> None:
        """Fill the columns: the random numbers of the stream, and the earlier output of a retracted sample."""
        length = max(sequence.request.sampling.max_new_tokens for sequence in sequences)
        missing = length - self._tokens.shape[0]
        if missing > 0:
            self._tokens = torch.cat((self._tokens, self._tokens.new_zeros(missing, self.stride)))
            self._logprobs = torch.cat((self._logprobs, self._logprobs.new_zeros(missing, self.stride)))
            self._uniforms = torch.cat((self._uniforms, self._uniforms.new_zeros(missing, self.stride)))
        device = self._tokens.device
        columns = _longs([sequence.column for sequence in sequences], device)
        seeds = _longs([signed_64(sequence.seed) for sequence in sequences], device)
        offsets = _longs([sequence.request.sampling.seed_offset for sequence in sequences], device)
        self._uniforms[:length, columns] = uniforms_TR(seeds, offsets, length)
        for sequence in sequences:
            if done := len(sequence.partial.tokens):
                self._tokens[:done, sequence.column] = _longs(sequence.partial.tokens, device)
                self._logprobs[:done, sequence.column] = torch.tensor(sequence.partial.logprobs, device=device)

    def uniforms(self, output_R: Tensor) -> Tensor:
        """Return the random numbers `[R]` at flat indices `output_R`."""
        return self._uniforms.view(-1).index_select(0, output_R)

    def write(self, output_R: Tensor, tokens_R: Tensor, logprobs_R: Tensor) -> None:
        """Record a step's tokens and log-probabilities at flat indices `output_R`."""
        self._tokens.view(-1).index_copy_(0, output_R, tokens_R)
        self._logprobs.view(-1).index_copy_(0, output_R, logprobs_R)

    def read(self, columns: list[int], length: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the first `length` tokens and log-probabilities of `columns`, as lists."""
        index = _longs(columns, self._tokens.device)
        tokens: list[list[int]] = self._tokens[:length].index_select(1, index).T.tolist()
        logprobs: list[list[float]] = self._logprobs[:length].index_select(1, index).T.tolist()
        return tokens, logprobs


def _longs(values: Collection[int] | Collection[Collection[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=device)


class RowTable:
    """State of at most `max_rows` running samples of a model with `vocab_size` tokens.

    Attributes:
        outputs: output of the samples, by column.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self.outputs = OutputColumns(max_rows, device)
        self._ints = torch.zeros(7, max_rows, dtype=torch.long, device=device)
        self._floats = torch.zeros(3, max_rows, device=device)
        self._stops = torch.full((max_rows, 1), NO_STOP, dtype=torch.long, device=device)
        self._advance = torch.tensor([[1], [self.outputs.stride]], device=device)
        self._idle_state = torch.tensor([[0], [max_rows], [-1], [0], [0], [vocab_size], [0]], device=device)
        self._sampling: RowSampling | None = None
        self._minimum_lengths = False

    def leave(self, sequences: list[Sequence]) -> None:
        """Let the rows of `sequences` run empty: at position 0, writing to the spare output column, never finishing by
        length.
        """
        self._ints[:, self._tensor([sequence.row for sequence in sequences])] = self._idle_state
        self.outputs.leave([sequence.column for sequence in sequences])
        for sequence in sequences:
            sequence.column = -1

    def join(self, sequences: list[Sequence]) -> None:
        """Write the state of samples that enter the batch; each knows its row and column."""
        self._widen_stops(sequences)
        rows = self._tensor([sequence.row for sequence in sequences])
        n = self.outputs.stride
        ints, floats = [], []
        for sequence in sequences:
            spec = sequence.request.sampling
            done, column = len(sequence.partial.tokens), sequence.column
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
        self.outputs.begin(sequences)

    def _widen_stops(self, sequences: list[Sequence]) -> None:
        stops = max(len(sequence.request.sampling.stop_token_ids) for sequence in sequences)
        rows, width = self._stops.shape
        if stops > width:
            self._stops = torch.cat((self._stops, self._stops.new_full((rows, stops - width), NO_STOP)), dim=1)

    def _tensor(self, values: Collection[int] | Collection[Collection[int]]) -> Tensor:
        return _longs(values, self._device)

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
        """Return positions `[R]` of the tokens being decoded."""
        return self._ints[POSITION, :rows]

    def deltas(self, rows: int) -> Tensor:
        """Return the difference between the positions of the rotary embedding and `positions`, `[R]`."""
        return self._ints[DELTA, :rows]

    def inputs(self, rows: int) -> Tensor:
        """Return tokens `[R]` being decoded."""
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
        tokens, logprobs = sample(logits_RV, self.outputs.uniforms(output), self._sampling)
        self.outputs.write(output, tokens, logprobs)
        stopped = stops[:, 0] == tokens if stops.shape[1] == 1 else (stops == tokens[:, None]).any(1)
        finished = stopped.logical_or_(output == ints[LAST_OUTPUT])
        ints[TOKEN].copy_(tokens)
        ints[: OUTPUT + 1].add_(self._advance)
        return finished

    def _suppress_stops(self, logits_RV: Tensor, output: Tensor, stops: Tensor) -> None:
        """Lower the logits of stop tokens in rows that are too short to stop; the host does not wait for the device."""
        early = (output < self._ints[FIRST_STOP, : len(output)])[:, None] & (stops != NO_STOP)
        added = logits_RV.new_zeros(stops.shape).masked_fill_(early, -torch.inf)
        logits_RV.scatter_add_(1, stops.clamp(min=0), added)
