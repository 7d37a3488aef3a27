"""Select the layout of a model that the ranks of a grid hold in parts, by a small model of the same code.

The parity check of a layout (`trainer.model.layout_parity`) needs a whole model. It looks for tokens of one sequence
that influence another sequence, which depends on the code of the layers and not on their number or values. So the
grid's first rank checks a small model of the same configuration, and sends the result to the others. That model has
random weights, a small vocabulary and the fewest layers that include one of each kind.

If ranks have parts of the tokens (`c`), the ranks of the first copy then compute the same small model together, as they
will in training. They compare the result with transformers' plain forward, which differs if anything but attention
looks along the sequence (a recurrence, a convolution).
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from asyncrl.config.context import context_length
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.models.parity import Difference, Rounding, UnsupportedModelError, forks, probe_for, told
from asyncrl.models.pictures.picture_rules import TOKEN_FIELDS
from asyncrl.models.ranks import Ranks
from asyncrl.models.transformers_internals import language_model, set_attention
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.engines.flat.engine import FlatPolicyEngine
from asyncrl.trainer.engines.sharded.context_parallel import across_ranks, cut_to_part, part_of
from asyncrl.trainer.model.layout_parity import (
    SequenceLayout,
    layouts,
    refuse_longer_than_independent,
    select_attention,
    ways,
)
from asyncrl.trainer.model.load_models import prepare_vision
from asyncrl.trainer.parallel.rank_position import RankPosition

_VOCABULARY = 512
_LAYERS = 2
_SPREAD = 0.02
"""Standard deviation of parameters that are zeros in a new model."""


def select_layout(
    path: str, config: ExperimentConfig, dtype: torch.dtype, device: torch.device, place: RankPosition
) -> SequenceLayout:
    """Return the first layout of `model.attn_implementation` that computes the model in `path` correctly.

    Called by all ranks of the grid.

    Raises:
        UnsupportedModelError: no layout is correct, or the ranks with parts of the tokens compute another result.
        PeerFailed: another rank raised this.
    """
    choices, chosen = layouts(config.model.attn_implementation), torch.zeros(1, dtype=torch.int64)

    def select() -> None:
        if place.everyone.leads:
            chosen.fill_(choices.index(_select_alone(path, config, dtype, device, in_parts=place.grid.context > 1)))

    def check_parts() -> None:
        here = place.coordinates
        if here.pipeline == here.data == here.tensor == 0:
            _check_parts(_surrogate(path, dtype, device, config.seed), layout, place.context)

    place.everyone.together(select, f"checking the layouts for {path}")
    layout = choices[int(place.everyone.broadcast(chosen))]
    if place.grid.context > 1:
        place.everyone.together(check_parts, f"checking c{place.grid.context} for {path}")
    return layout


def _select_alone(
    path: str, config: ExperimentConfig, dtype: torch.dtype, device: torch.device, *, in_parts: bool
) -> SequenceLayout:
    """Return the first layout that is correct in this process; if tokens will be cut, among those that allow it."""
    setting = config.model.attn_implementation
    model = _surrogate(path, dtype, device, config.seed)
    pictures = prepare_vision(model, path, config.model.vision)
    if in_parts and pictures is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes pictures, whose tokens are not cut into parts (c in trainer.parallel); use "
            "c1, or model.vision=none for text alone"
        )
    engine = FlatPolicyEngine(
        model, temperature=1.0, attention=layouts(setting)[0].kind, tokens_per_micro_batch=1, pictures=pictures
    )
    longest = context_length(config, model.config.to_dict())
    refuse_longer_than_independent(model, longest)
    return select_attention(
        engine,
        setting,
        longest=longest,
        row=config.trainer.tokens_per_micro_batch,
        share_prefixes=config.trainer.share_prefixes,
        one_stream=in_parts,
    )


class _InParts(FlatPolicyEngine):
    """A whole model; each of `ranks` computes a part of the tokens, and all ranks have the results."""

    def __init__(self, model: PreTrainedModel, kind: AttentionKind, ranks: Ranks) -> None:
        super().__init__(model, temperature=1.0, attention=kind, tokens_per_micro_batch=1)
        self._ranks = ranks

    def _hidden(self, micro_batch: MicroBatch) -> Tensor:
        cut = cut_to_part(micro_batch, self._ranks)
        part = part_of(cut)
        assert part is not None
        return part.of_stream(super()._hidden(cut))


def _check_parts(model: PreTrainedModel, layout: SequenceLayout, ranks: Ranks) -> None:
    """Compare the joint result of `ranks`, each with a part of the tokens, with transformers' own forward.

    Raises:
        UnsupportedModelError: the results differ.
    """
    probes = probe_for(model)
    sequences = [*probes, *forks(probes)]
    for kind, attention in ways(layout):
        try:
            engine = _InParts(model, kind, ranks)
            plain = [engine.plain(tokens) for tokens in sequences]
            set_attention(model, across_ranks(attention))
            with torch.no_grad():
                fault = Difference.of(plain, engine.together(sequences)).beyond(Rounding.least(model.dtype))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any error of a model's own code is a reason to refuse the model
            fault = f"its forward fails: {told(error)}"
        if fault is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be trained with the tokens of a micro-batch in {ranks.world} parts "
                f"(c{ranks.world} in trainer.parallel): {fault}. Use c1, or another model"
            )


def _surrogate(path: str, dtype: torch.dtype, device: torch.device, seed: int) -> PreTrainedModel:
    """Return a small model with random weights, on `device`, whose code is that of the model in `path`.

    Args:
        seed: seed of the weights, so that several ranks have the same weights.
    """
    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    kinds: list[str] = list(getattr(text, "layer_types", None) or [])
    _shorten(text, max(_LAYERS, *(kinds.index(kind) + 1 for kind in kinds)) if kinds else _LAYERS)
    text.vocab_size = min(text.vocab_size, _VOCABULARY)
    for name in TOKEN_FIELDS:
        if getattr(config, name, None) is not None:
            setattr(config, name, min(getattr(config, name), text.vocab_size - 1))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(text, name, None)
        if isinstance(token, int) and token >= text.vocab_size:
            setattr(text, name, None)
    with torch.random.fork_rng(devices=[]):  # drawing weights must not advance the run's random state
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = language_model(path).from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if not parameter.any():  # Gemma 3's projector: every picture would give the same rows
                nn.init.normal_(parameter, std=_SPREAD)
    model.train(False)
    nn.Module.to(model, device)
    return model


def _shorten(text: PretrainedConfig, layers: int) -> None:
    """Keep the first `layers` layers, also in settings that list values by layer."""
    before = text.num_hidden_layers
    if layers >= before:
        return
    for name, value in deepcopy(text.to_dict()).items():
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
