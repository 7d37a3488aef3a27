"""The parity check: an engine must compute what transformers computes, and keep sequences apart. It runs at load.

The reference is transformers' own forward: eager attention, one sequence at a time, no cache. An engine gets
several short sequences at once, as in a run:

1. **Equal** (`Difference`). The engine sums in another order than the reference and so differs by rounding: on average
   by some 1e-6 nats a token in fp32, by some 1e-2 in bf16. Trained weights multiply it, by as much as the model does:
   transformers itself then differs as much with another attention kernel, and that is measured (`Rounding`). Errors
   differ by 0.1 to 4 nats on real weights: state that
   leaked from a neighbour, a missing attention sink or soft cap, the slot of another row. The mean over all
   tokens is compared, and that of each sequence: rounding, and the occasional expert that it flips, averages to
   little, while an error in one of ten tokens still shows.
2. **Alone** (`find_leak`), for engines that train. Random weights of the usual spread make attention almost uniform,
   and a leak then hides in the rounding (LFM2 at 0.02: 3e-6 nats in fp32). Its gradient does not hide: the output of
   one sequence must have a gradient of *exactly* 0 with respect to the token embeddings of another, in any dtype. A
   product with a masked weight is 0, not small, and a mixture of experts, whose group sizes depend on the neighbours,
   passes no gradient between tokens either.

Short sequences do not reach a longer window or chunk of attention. So everything is checked
again on a copy of the model in which these lengths are short (`short_model`). A window of a few tokens changes little
if attention is almost uniform, so the tolerance is smaller there. An engine may differ by a tenth of the change that
the short lengths make, or by a few times its rounding without them.

A short length is a sliding window of 4,096 tokens, a chunk of 8,192, or the 2,048 best keys of an index; the copy's
config has `SHORT` instead, with the same weights. No list of names would cover all fields that are lengths. A field
counts as a length if lowering it keeps the shapes of the parameters, unlike a size, and the copy still computes. Other
factors that pass this test do no harm: the copy is an ordinary model, and an engine must compute it as transformers
does.

Tables of positions are the other kind of length: a row of several sequences, end to end, may be longer than the table.
If parameters or buffers have an entry for each position, the copy has just enough for the sequences of this check.
"""

from __future__ import annotations

import copy
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.models.transformers_internals import attention, context_limit, new_model, text_part, text_settings

if TYPE_CHECKING:
    from asyncrl.models.pictures import Pictures

Tokens = Sequence[int]
LENGTHS = (19, 12, 11, 7)
"""Lengths of the sequences: ragged, and so short that the check costs a few forwards of a sentence or two."""
TEXT_BEHIND = 5
"""Number of tokens at the end of a sequence with a picture that are certainly text."""
_SEED = 77
FLOAT32_TOLERANCE = 1e-4
COARSE_TOLERANCE = 0.05
"""Mean absolute difference per token, in nats or relative to a hidden state's size, that is always rounding in bf16 and
fp16. Trained weights may allow more (`Rounding`).
"""
_OWN_DIFFERENCES = 2.0, 3.0
"""Multiples of the differences of transformers' kernels among themselves, in the mean and of one sequence, that an
engine may have. It has more sequences, and shorter ones."""
_ONE_SEQUENCE = 5.0
"""The mean of a single sequence, of a few tokens, may always be this multiple of what the mean of all may be: an expert
that rounding flips changes it."""
_MOST = 6.0
"""Largest multiple of the tolerances above that may be rounding: beyond it transformers' kernels contradict each other.
"""
_ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-6}
_COARSE_ROUNDING = 1e-3
"""Mean difference that an engine may always have, even if shorter lengths change the result very little."""
SHORT = 8
"""The lowered lengths: below most of the parity check's sequences, and a power of two, as blocks must be."""
_NO_LENGTH = re.compile(r"^(num|n)_|_ids?$|_dim$|intermediate_size|^original_max_position_embeddings$")
"""Names of counts, tokens and widths, and of the fields that `batch_independent_limit` reads."""
_POSITIONS = "max_position_embeddings"


class UnsupportedModelError(ValueError):
    """An engine cannot compute this model; the message holds the architecture, the reason and what works."""


class Rounding(NamedTuple):
    """The largest difference that counts as rounding in a model of type `dtype`: in the mean, and of one sequence."""

    mean: float
    of_one: float
    dtype: torch.dtype

    @classmethod
    def least(cls, dtype: torch.dtype) -> Rounding:
        """Return what any parameters of `dtype` allow."""
        mean = FLOAT32_TOLERANCE if dtype in (torch.float32, torch.float64) else COARSE_TOLERANCE
        return cls(mean, _ONE_SEQUENCE * mean, dtype)

    @classmethod
    def of(cls, plain: Sequence[Tensor], again: Sequence[Tensor], dtype: torch.dtype) -> Rounding:
        """Measure it by two results of transformers: `plain`, and those of another attention kernel."""
        least, own = cls.least(dtype), Difference.of(plain, again)
        mean, of_one = (factor * its for factor, its in zip(_OWN_DIFFERENCES, own, strict=False))
        mean, of_one = max(least.mean, mean), max(least.of_one, of_one)
        return cls(min(_MOST * least.mean, mean), min(_MOST * least.of_one, of_one), dtype)

    def within(self, effect: float, difference: float) -> Rounding:
        """Return the rounding where a change of the model's input or lengths must show.

        Args:
            effect: mean difference that the change makes in transformers' plain forward.
            difference: mean difference of the engine from transformers without the change.
        """
        mean = min(self.mean, max(0.1 * effect, 8 * difference, _ROUNDING.get(self.dtype, _COARSE_ROUNDING)))
        return Rounding(mean, min(self.of_one, _ONE_SEQUENCE * mean), self.dtype)


def probe_sequences(vocabulary: int, context: int | None = None) -> list[list[int]]:
    """Return the sequences to compute, longest first; none longer than `context`.

    Sequences at even and at odd places have no token in common if the vocabulary has at least two tokens.
    """
    draw = random.Random(_SEED)
    half = vocabulary // 2
    lengths = LENGTHS if context is None else [min(length, context) for length in LENGTHS]
    return [
        [draw.randrange(half, vocabulary) if index % 2 else draw.randrange(max(half, 1)) for _ in range(length)]
        for index, length in enumerate(lengths)
    ]


def probe_for(model: PreTrainedModel) -> list[list[int]]:
    """Return `probe_sequences` for `model`."""
    return probe_sequences(int(text_settings(model.config)["vocab_size"]), context_limit(model.config))


def forks(sequences: Sequence[Tokens]) -> list[list[int]]:
    """Return sequences that begin like `sequences` and continue differently, also forks of forks and a prefix of
    another.

    In `sequences` followed by the forks, sequences at even and at odd places still have no token in common.
    """
    even, odd, other, _ = (list(tokens) for tokens in sequences[:4])
    half, third = len(even) // 2, len(odd) // 3
    return [
        [*even[:half], *other[: half or 1]],
        [*odd[:third], *odd[: third or 1]],
        [*even[:half], *other[: third or 1], *even[: half or 1]],
        odd[:-1] or odd,
    ]


class Difference(NamedTuple):
    """Difference between an engine and transformers on several sequences, per token: in nats, or relative to a hidden
    state.

    Attributes:
        mean: over all tokens.
        of_one: largest mean over the tokens of one sequence.
        worst: largest of a token.
    """

    mean: float
    of_one: float
    worst: float
    sequences: int

    @classmethod
    def of(cls, plain: Sequence[Tensor], engine: Sequence[Tensor]) -> Difference:
        """Compare transformers' results for each sequence alone with the engine's results for all together.

        Args:
            plain: transformers' number or vector for each token of each sequence.
            engine: the engine's numbers or vectors. Both are in nats, or hidden states `in_rms`.
        """
        errors = [(mine.float() - its.float()).abs().flatten() for its, mine in zip(plain, engine, strict=True)]
        means, everything = torch.stack([each.mean() for each in errors]), torch.cat(errors)
        return cls(float(everything.mean()), float(means.max()), float(everything.max()), len(errors))

    def beyond(self, allowed: Rounding) -> str | None:
        """Describe this difference as a fault; None if it is rounding."""
        if self.mean <= allowed.mean and self.of_one <= allowed.of_one:
            return None
        return (  # NaN too
            f"{self.sequences} sequences computed together differ from transformers' plain forward of each alone by "
            f"{self.mean:.2g} a token in the mean, {self.of_one:.2g} in one of them, {self.worst:.2g} at worst, where "
            f"rounding is below {allowed.mean:.2g}, {allowed.of_one:.2g} in one"
        )


def find_leak(
    model: PreTrainedModel,
    sequences: Sequence[Tokens],
    together: Callable[[Sequence[Tokens]], Sequence[Tensor]],
) -> str | None:
    """Return a message if a sequence influences the engine's output for another one; None if none does.

    Args:
        model: the model whose input embedding the engine calls.
        sequences: sequences at even and at odd places must have no token in common (`probe_sequences`).
        together: runs the engine on several sequences at once, differentiably.
    """
    embedding: nn.Module = model.get_input_embeddings()
    embedded: list[tuple[Tensor, Tensor]] = []

    def hold(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        embedded.append((inputs[0].flatten(), leaf))
        return leaf

    handle = embedding.register_forward_hook(hold)
    try:
        with torch.enable_grad():
            outputs = together(sequences)
    finally:
        handle.remove()
    total = torch.stack([output.float().sin().sum() for output in outputs[1::2]]).sum()
    gradients = torch.autograd.grad(total, [leaf for _, leaf in embedded], materialize_grads=True)
    own = torch.tensor(sorted({token for tokens in sequences[1::2] for token in tokens}), device=total.device)
    foreign, mine = 0.0, 0.0
    for (tokens_I, _), gradient in zip(embedded, gradients, strict=True):
        sizes_I = gradient.flatten(0, -2).abs().amax(-1)
        is_own_I = torch.isin(tokens_I, own)
        mine += float(sizes_I[is_own_I].sum())
        foreign += float(sizes_I[~is_own_I].sum())
    if mine == 0.0:
        return "its outputs have no gradient by its own tokens, so that nothing can be learnt and nothing be proven"
    if foreign == 0.0:
        return None
    return f"packed sequences leak into each other: of the gradient, {foreign / (foreign + mine):.1g} is by neighbours"


def plain_logprobs(model: PreTrainedModel, tokens: Tokens, pictures: Pictures | None = None) -> Tensor:
    """Return log p(tokens[t] | tokens[:t]) for t >= 1 at temperature 1 by transformers alone, [L - 1], fp32.

    Rows of pictures count as the placeholder.
    """
    inputs = _plain_inputs(model, tokens, pictures)
    with torch.no_grad(), attention(model, "eager"):
        logits_LV: Tensor = model(**inputs, use_cache=False).logits[0]
    return _chosen(logits_LV, inputs["input_ids"][0])


def plain_hidden(trunk: PreTrainedModel, tokens: Tokens, pictures: Pictures | None = None) -> Tensor:
    """Return each token's last hidden state by transformers alone, [L, H], fp32, divided by its root mean square."""
    with torch.no_grad(), attention(trunk, "eager"):
        inputs = _plain_inputs(trunk, tokens, pictures)
        hidden_LH: Tensor = trunk(**inputs, use_cache=False).last_hidden_state[0]
    return in_rms(hidden_LH)


def other_kernel(model: PreTrainedModel, sequences: Sequence[Tokens]) -> list[Tensor]:
    """Return what `plain_logprobs` returns for each of `sequences`, or `plain_hidden` for a trunk, with the same
    rounding errors drawn anew: by torch's attention kernel if the model has it, on padded rows.
    """
    longest = max(map(len, sequences))
    rows = [[*tokens, *[tokens[-1]] * (longest - len(tokens))] for tokens in sequences]
    ids_BL = torch.tensor(rows, device=model.device)
    has_kernel = bool(text_part(model)._supports_sdpa)
    with torch.no_grad(), attention(model, "sdpa" if has_kernel else "eager"):
        output = model(input_ids=ids_BL, use_cache=False)
    if "logits" not in output:
        hidden_BLH = output.last_hidden_state
        return [in_rms(hidden_LH[: len(its)]) for its, hidden_LH in zip(sequences, hidden_BLH, strict=True)]
    logits_BLV = output.logits
    return [_chosen(logits_BLV[row, : len(its)], ids_BL[row, : len(its)]) for row, its in enumerate(sequences)]


def _chosen(logits_LV: Tensor, ids_L: Tensor) -> Tensor:
    logprobs: Tensor = logits_LV[:-1].float().log_softmax(-1).gather(-1, ids_L[1:, None])[:, 0]
    return logprobs


def _plain_inputs(model: PreTrainedModel, tokens: Tokens, pictures: Pictures | None) -> dict[str, Tensor]:
    if pictures is not None and max(tokens) >= pictures.ids.first:
        return pictures.plain_inputs(tokens)
    return {"input_ids": torch.tensor([list(tokens)], device=model.device)}


def in_rms(hidden_LH: Tensor) -> Tensor:
    """Return hidden states in multiples of their root mean square, fp32."""
    hidden_LH = hidden_LH.float()
    return hidden_LH / hidden_LH.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-12)


def one_line(error: Exception) -> str:
    """Describe an exception in a model's own code as a reason to refuse the model."""
    return f"{type(error).__name__}: {error!s:.160}"


class Subject(ABC):
    """A model that an engine must compute as transformers does; transformers' plain results are the truth.

    Args:
        network: the model.
        weights: its parameters, by their names in a new model.
        pictures: its pictures; None if it is used for text alone.
        sequences: what the engine computes together.
        original: of a copy with short lengths, the subject that it is a copy of.
        lengths: of a copy, the fields that were lowered, with the original's values.

    Raises:
        UnsupportedModelError: transformers cannot compute the model.
    """

    forward_of_engine = "its forward"
    """Name of what fails if the engine raises an error, for messages."""

    def __init__(
        self,
        network: PreTrainedModel,
        weights: Mapping[str, Tensor],
        pictures: Pictures | None,
        sequences: Sequence[Tokens],
        original: Subject | None = None,
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        self.network, self._weights, self._pictures, self.sequences = network, weights, pictures, sequences
        self._original, self._lengths = original, lengths or {}
        self._of_text = 0.0  # mean difference of the engine on sequences of text
        try:
            self._compute_plain()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any error of a model's own code is a reason to refuse the model
            dtype = str(network.dtype).removeprefix("torch.")
            raise self._refusal(f"transformers' own forward of it in {dtype} fails: {one_line(error)}") from error

    def _compute_plain(self) -> None:
        self.plain = [self._plain(tokens) for tokens in self.sequences]
        self._rounding = Rounding.of(self.plain, self._plain_again(), self.network.dtype)
        self._shown, self._held = ([], []) if self._pictures is None else self._pictures.probes(self.sequences)
        self._plain_shown = [self._plain(tokens) for tokens in self._shown]

    @abstractmethod
    def _refusal(self, reason: str) -> UnsupportedModelError:
        """Return the error that refuses the model for `reason`."""

    @abstractmethod
    def _plain(self, tokens: Tokens) -> Tensor:
        """Run transformers' own forward on one sequence."""

    @abstractmethod
    def _plain_again(self) -> Sequence[Tensor]:
        """Run transformers' own forward on all `sequences` with another kernel (`other_kernel`)."""

    @abstractmethod
    def _copy(self, short: ShortModel) -> Self:
        """Return the subject of a copy with short lengths."""

    @abstractmethod
    def _difference(self, sequences: Sequence[Tokens], plain: Sequence[Tensor]) -> Difference:
        """Compute `sequences` with the engine, and compare the results with `plain`."""

    def _leak(self, sequences: Sequence[Tokens]) -> str | None:
        """Return a message if one of `sequences` influences the results of another; for engines that train."""
        return None

    def with_short_lengths(self, reach: int) -> Self | None:
        """Return a copy of the model in which each length up to `reach` is lowered below its sequences; None if it has
        no such length.
        """
        fitting = max(map(len, self.sequences))
        short = short_model(self.network, self._weights, reach, fitting)
        return None if short is None else self._copy(short)

    @property
    def shortest(self) -> int:
        """The shortest length that was lowered."""
        return min(self._lengths.values())

    def found_fault(self) -> str | None:
        """Describe how the engine's results, as it is set, are wrong; None if they are right."""
        fault = self._tried(self._fault_of_text, self.forward_of_engine)
        if fault is None and self._shown and (fault := self._tried(self._fault_with_pictures, "its forward")):
            fault = f"with pictures, {fault} (model.vision=none uses it for text alone)"
        if fault and self._lengths:
            lengths = " and ".join(f"{name}={value}" for name, value in self._lengths.items())
            fault = f"in rows longer than {lengths}, {fault}"
        return fault

    @staticmethod
    def _tried(check: Callable[[], str | None], forward: str) -> str | None:
        try:
            return check()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # as above
            return f"{forward} fails: {one_line(error)}"

    def _fault_of_text(self) -> str | None:
        allowed = self._rounding
        if self._original is not None:
            effect = Difference.of(self._original.plain, self.plain).mean
            allowed = self._rounding.within(effect, self._original._of_text)
        difference = self._difference(self.sequences, self.plain)
        self._of_text = difference.mean
        return difference.beyond(allowed) or self._leak(self.sequences)

    def _fault_with_pictures(self) -> str | None:
        one, _, other, *_ = self._plain_shown
        effect = Difference.of([one[-TEXT_BEHIND:]], [other[-TEXT_BEHIND:]]).mean
        if effect == 0.0:
            return "it computes the same whatever the picture"
        difference = self._difference(self._shown, self._plain_shown)
        return difference.beyond(self._rounding.within(effect, self._of_text)) or self._leak(self._shown)


class ShortModel(NamedTuple):
    """A copy of a model with short lengths.

    Attributes:
        model: shares the memory of the original's parameters, and has the first entries of tables of positions.
        lengths: the lowered fields of the config, with the original values.
    """

    model: PreTrainedModel
    lengths: Mapping[str, int]


def short_model(model: PreTrainedModel, weights: Mapping[str, Tensor], reach: int, fitting: int) -> ShortModel | None:
    """Return a copy of `model` in which every length up to `reach` is lowered; None if there is no such length.

    Args:
        weights: the parameters, by their names in a new model.
        reach: number of tokens of the run's longest row.
        fitting: number of tokens of the longest sequence that the copy must compute.
    """
    shapes = _Shapes.of(_skeleton(model, model.config))
    found, lengths = None, {}
    for name, value in sorted(_lengths(model.config, reach).items()):
        config = copy.deepcopy(model.config if found is None else found.config)
        _lower(config, name, reach)
        made = _computing(model, config, weights, fitting, shapes, tables=False)
        if made is not None:
            found, lengths[name] = made, value
    limit = context_limit(model.config)
    if limit is not None and fitting < limit <= reach:
        config = copy.deepcopy(model.config if found is None else found.config)
        setattr(config.get_text_config(), _POSITIONS, fitting)
        made = _computing(model, config, weights, fitting, shapes, tables=True)
        if made is not None:
            found, lengths[_POSITIONS] = made, limit
    return None if found is None else ShortModel(found, lengths)


class _Shapes(NamedTuple):
    parameters: dict[str, torch.Size]
    buffers: dict[str, torch.Size]

    @classmethod
    def of(cls, model: nn.Module) -> _Shapes:
        return cls({n: p.shape for n, p in model.named_parameters()}, {n: b.shape for n, b in model.named_buffers()})


def _computing(
    model: PreTrainedModel,
    config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    fitting: int,
    shapes: _Shapes,
    *,
    tables: bool,
) -> PreTrainedModel | None:
    """Return `model` with another `config`, with the same shapes or others (`tables`); None if that is impossible."""
    try:
        made = _skeleton(model, config)
        if _Shapes.of(made) == shapes if tables else _Shapes.of(made).parameters != shapes.parameters:
            return None
        _take_weights(made, model, weights)
        with torch.no_grad(), attention(made, "eager"):
            made(input_ids=torch.zeros(1, fitting, dtype=torch.long, device=model.device), use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the field is a size: a model's own code may raise any error
        return None
    return made


def _skeleton(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of the class of `model` with buffers but without memory for parameters."""
    with torch.device("meta"):
        made = new_model(type(model), copy.deepcopy(config), model.dtype)
    for module in made.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    for parameter in made.parameters():
        setattr(parameter, "_is_hf_initialized", True)  # noqa: B010 - or transformers would draw values
    with torch.random.fork_rng(devices=[]):
        made.initialize_weights()  # type: ignore[no-untyped-call]  # computes the buffers
    return made


def _take_weights(made: nn.Module, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the parameters of `made` by `weights`, and its buffers by the saved buffers of `model`."""
    buffers = dict(model.named_buffers())
    device = next(iter(weights.values())).device
    for prefix, module in made.named_modules():
        path = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                first = weights[path + name][tuple(slice(size) for size in parameter.shape)]
                module._parameters[name] = nn.Parameter(first.detach(), requires_grad=False)
        for name, buffer in module._buffers.items():
            saved = None if name in module._non_persistent_buffers_set else buffers.get(path + name)
            if buffer is not None:
                same = saved is not None and saved.shape == buffer.shape
                module._buffers[name] = saved if same else buffer.to(device)


def _lengths(config: PretrainedConfig, reach: int) -> dict[str, int]:
    """Return the fields that may be lengths, and their largest values."""
    positions = {_POSITIONS, config.get_text_config().attribute_map.get(_POSITIONS)}
    found: dict[str, int] = {}
    for fields in _records(config.get_text_config()):
        for name, value in fields.items():
            lowered = [each for each in _numbers(value) if SHORT < each <= reach]
            if lowered and name not in positions and not _NO_LENGTH.search(name):
                found[name] = max(*lowered, found.get(name, 0))
    return found


def _lower(config: PretrainedConfig, name: str, reach: int) -> None:
    """Lower the field `name` wherever it is in `config`."""

    def low(value: Any) -> Any:
        return SHORT if type(value) is int and SHORT < value <= reach else value

    for fields in _records(config.get_text_config()):
        if name in fields:
            value = fields[name]
            fields[name] = [low(each) for each in value] if isinstance(value, list) else low(value)


def _records(fields: Any) -> Iterator[dict[str, Any]]:
    """Yield the fields of a config, and those of the configs and dictionaries in it."""
    own = vars(fields) if isinstance(fields, PretrainedConfig) else fields
    yield own
    for value in list(own.values()):
        if isinstance(value, (PretrainedConfig, dict)):
            yield from _records(value)


def _numbers(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if type(each) is int]
