"""One rank's part of a model: the layers of its pipeline stage, as one module whose forward is one micro-batch.

Layers of other stages are replaced by modules that pass hidden states on. So the rest keep their indices, on which
their names in a model folder and their kind (`layer_types` of a model) depend.

If the vocabulary is cut into slices, log-probabilities and entropies take three numbers per token from each rank: the
largest logit, then the sums of exp and of exp times logit, with the target's logit. All ranks get the same values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.models.chunked_logprobs import EntropyMode, LogitsOf, restricted, token_logprobs
from asyncrl.models.transformers_internals import text_part
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.engines.sharded.context_parallel import part_of
from asyncrl.trainer.engines.sharded.tensor_parallel import Group, LayoutError, local_parameters
from asyncrl.trainer.parallel.placement import stage_layers

EMBEDDING, NORM, LAYERS = "embed_tokens", "norm", "layers"
"""Parts that a trunk must have to be cut into stages: transformers' names in nearly all decoders."""


@dataclass(frozen=True, slots=True)
class StagePosition:
    """Index of a stage and number of stages; one stage is a model that is not cut."""

    index: int = 0
    stages: int = 1

    @property
    def first(self) -> bool:
        """True if the stage has the input embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """True if the stage has the final norm and the head."""
        return self.index == self.stages - 1

    def layers(self, total: int) -> range:
        """The layers of this stage."""
        return stage_layers(total, self.stages, self.index)


class PassThroughLayer(nn.Module):
    """Placeholder for a layer of another stage."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the hidden states unchanged."""
        return hidden_states


def cut_stage(model: PreTrainedModel, position: StagePosition) -> None:
    """Remove all modules of the trunk `model` that do not belong to the stage at `position`. A vision tower belongs to
    the first stage.

    Raises:
        LayoutError: the trunk is not an embedding, a list of layers and a norm, has fewer layers than stages, or feeds
            pictures into more layers than the first stage has.
    """
    if position.stages == 1:
        return
    trunk = text_part(model)
    children = dict(trunk.named_children())
    layers = children.get(LAYERS)
    if not isinstance(layers, nn.ModuleList) or not {EMBEDDING, NORM} <= children.keys():
        raise LayoutError(f"{type(trunk).__name__} cannot be cut into pipeline stages; use d or t in trainer.parallel")
    mine = position.layers(len(layers))
    if not mine:
        raise LayoutError(
            f"{len(layers)} layers cannot be cut into {position.stages} stages; lower p in trainer.parallel"
        )
    deep = len(getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    if deep > len(first := StagePosition(0, position.stages).layers(len(layers))):
        raise LayoutError(
            f"the pictures of {type(model).__name__} go into its first {deep} layers, and the first of "
            f"{position.stages} stages has {len(first)}; lower p in trainer.parallel"
        )
    for index in range(len(layers)):
        if index not in mine:
            layers[index] = PassThroughLayer()
    if not position.first:
        if model is not trunk:
            others = [name for name, child in model.named_children() if trunk not in child.modules()]
            own = [name for name, _ in model.named_parameters(recurse=False)]  # between the rows of a picture
            for name in (*others, *own):
                setattr(model, name, None)
            model._is_hf_initialized = True  # transformers would look for the removed parts
        setattr(trunk, EMBEDDING, None)
        if hasattr(trunk, "embedding_multiplier"):  # Granite's forward applies it to any input
            trunk.embedding_multiplier = cast(Any, 1.0)
    if not position.last:
        setattr(trunk, NORM, nn.Identity())


class Stage(nn.Module, ABC):
    """A trunk's layers of one stage; a subclass adds the head, on the last stage.

    `forward(micro_batch, hidden)` returns hidden states [rows, width, H] of the stage's last layer; the last stage
    returns a tuple of its head's outputs. A micro-batch that was cut to a part of its stream gives the hidden states
    of the part, and the last stage's outputs for the whole stream.
    """

    def __init__(self, trunk: PreTrainedModel, position: StagePosition) -> None:
        super().__init__()
        self.trunk = trunk
        self.position = position
        self.seeing: Callable[[MicroBatch], AbstractContextManager[None]] = lambda micro_batch: nullcontext()
        """Returns a context within which the trunk has the pictures of a micro-batch. Set by the engine; called while
        FSDP2 has the vision tower gathered."""
        decoder = set(text_part(trunk).modules())
        tower = (module for module in trunk.modules() if module not in decoder)
        self._tower = [module for module in tower if any(True for _ in module.parameters(recurse=False))]

    def forward(self, micro_batch: MicroBatch, hidden: Tensor | None = None, **outputs: Any) -> Any:
        """Run one micro-batch; `hidden` are the hidden states of the stage before, None on the first."""
        inputs = dict(micro_batch.model_inputs)
        if not self.position.first:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = hidden
        output = self._seen(micro_batch, inputs) if self._tower else self._hidden(inputs)
        if not self.position.last:
            return output
        # No views: FSDP hooks the tensors themselves, and warns of writes into a view.
        return tuple(given.clone() for given in self.finish(output.flatten(0, 1), micro_batch, **outputs))

    def _hidden(self, inputs: dict[str, Any]) -> Tensor:
        part = self.trunk if self.position.first else text_part(self.trunk)
        output: Tensor = part(use_cache=False, **inputs).last_hidden_state
        return output

    def _seen(self, micro_batch: MicroBatch, inputs: dict[str, Any]) -> Tensor:
        """Return the hidden states, as `_hidden`, with pictures. Every parameter of a trained tower gets a gradient,
        also on a rank whose micro-batch has no pictures: data-parallel ranks reduce the same parameters.
        """
        with ExitStack() as stack:
            for module in self._tower:
                stack.enter_context(local_parameters(module, None))
            stack.enter_context(self.seeing(micro_batch))
            output = self._hidden(inputs)
            trained = [parameter for module in self._tower for parameter in module._parameters.values()]
            nothing = [each.sum() * 0.0 for each in trained if each is not None and each.requires_grad]
        return output + torch.stack(nothing).sum().to(output.dtype) if nothing else output

    @abstractmethod
    def finish(self, hidden_IH: Tensor, micro_batch: MicroBatch, **outputs: Any) -> tuple[Tensor, ...]:
        """Compute the last stage's outputs from the trunk's output, [rows * width, H]."""


class PolicyStage(Stage):
    """A language model's stage: log-probabilities [N] and entropies [N] of the wanted tokens.

    Args:
        output_embedding, logits_of: None on all stages but the last.
        slices: the tensor-parallel ranks, if each has the logits of a slice of `vocabulary`.
    """

    def __init__(
        self,
        trunk: PreTrainedModel,
        position: StagePosition,
        output_embedding: nn.Module | None = None,
        logits_of: LogitsOf | None = None,
        *,
        vocabulary: int,
        slices: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(trunk, position)
        self.lm_head = output_embedding
        self._logits_of, self._vocabulary, self._slices = logits_of, vocabulary, slices

    def finish(self, hidden_IH: Tensor, micro_batch: MicroBatch, **outputs: Any) -> tuple[Tensor, ...]:
        """See `Stage`; keywords: `temperature`, `entropy`, and `allowed_A` if not all tokens may be drawn."""
        part = part_of(micro_batch)
        if part is None:
            return self._score(hidden_IH.index_select(0, micro_batch.predictors_N), micro_batch.tokens_N, **outputs)
        wanted = part.wanted(micro_batch.predictors_N)
        hidden_MH = hidden_IH.index_select(0, wanted.indices)
        return tuple(map(wanted.of_all, self._score(hidden_MH, wanted.of(micro_batch.tokens_N), **outputs)))

    def _score(
        self,
        hidden_NH: Tensor,
        tokens_N: Tensor,
        *,
        temperature: float,
        entropy: EntropyMode,
        allowed_A: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        all_logits_of = self._logits_of
        assert all_logits_of is not None
        offset = 0 if self._slices is None else slice_offset(self._vocabulary, self._slices)

        def logits_of(hidden_NH: Tensor) -> Tensor:
            logits_Nv = all_logits_of(hidden_NH)
            return logits_Nv if allowed_A is None else restricted(logits_Nv, allowed_A, offset)

        score = None if self._slices is None else self._score_slices
        logprobs_N, entropy_N = token_logprobs(
            hidden_NH, tokens_N, logits_of, temperature=temperature, entropy=entropy, score=score
        )
        return (logprobs_N,) if entropy_N is None else (logprobs_N, entropy_N)

    def _score_slices(self, logits_Nv: Tensor, targets_N: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor]:
        assert self._slices is not None
        logprobs_N, entropy_N = sliced_logprobs(logits_Nv.float(), targets_N, self._vocabulary, self._slices)
        return logprobs_N, entropy_N if entropy == EntropyMode.differentiable else entropy_N.detach()


class ValueStage(Stage):
    """A critic's or reward model's stage: values at the wanted positions.

    Args:
        head: linear, fp32; None on all stages but the last.
    """

    def __init__(self, trunk: PreTrainedModel, position: StagePosition, head: nn.Linear | None) -> None:
        super().__init__(trunk, position)
        self.head = head

    def finish(self, hidden_IH: Tensor, micro_batch: MicroBatch, **outputs: Any) -> tuple[Tensor, ...]:
        """See `Stage`; `everywhere`: after every input token instead of before every wanted one."""
        indices = micro_batch.indices_I if outputs["everywhere"] else micro_batch.predictors_N
        part = part_of(micro_batch)
        if part is None:
            return (self._values(hidden_IH, indices),)
        wanted = part.wanted(indices)
        return (wanted.of_all(self._values(hidden_IH, wanted.indices)),)

    def _values(self, hidden_IH: Tensor, indices: Tensor) -> Tensor:
        assert self.head is not None
        values: Tensor = self.head(hidden_IH.index_select(0, indices).float()).squeeze(-1)
        return values


class _Logprobs(torch.autograd.Function):
    """With p the distribution and H its entropy: d log p_t / dx_j = [j = t] - p_j; dH / dx_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor, targets_N: Tensor, offset: int, group: Group) -> tuple[Tensor, Tensor]:
        width = logits_Nv.shape[-1]
        largest_N = logits_Nv.amax(dim=-1) if width else logits_Nv.new_full((len(logits_Nv),), float("-inf"))
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        shifted_Nv = logits_Nv - largest_N[:, None]
        exp_Nv = shifted_Nv.exp()
        local_N = targets_N - offset
        mine_N = (local_N >= 0) & (local_N < width)
        place_N = local_N.clamp(0, max(width - 1, 0))
        target_N = shifted_Nv.gather(-1, place_N[:, None]).squeeze(-1) if width else torch.zeros_like(largest_N)
        sums_3N = torch.stack([exp_Nv.sum(-1), (exp_Nv * shifted_Nv).sum(-1), torch.where(mine_N, target_N, 0.0)])
        dist.all_reduce(sums_3N, group=group)
        total_N, weighted_N, target_N = sums_3N
        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N
        ctx.save_for_backward(shifted_Nv, log_total_N, entropy_N, place_N, mine_N)
        return target_N - log_total_N, entropy_N

    @staticmethod
    def backward(ctx: Any, d_logprob_N: Tensor, d_entropy_N: Tensor) -> tuple[Tensor, None, None, None]:
        shifted_Nv, log_total_N, entropy_N, place_N, mine_N = ctx.saved_tensors
        log_p_Nv = shifted_Nv - log_total_N[:, None]
        grad_Nv = -(d_logprob_N[:, None] + d_entropy_N[:, None] * (log_p_Nv + entropy_N[:, None])) * log_p_Nv.exp()
        if grad_Nv.shape[-1]:
            grad_Nv.scatter_add_(-1, place_N[:, None], (d_logprob_N * mine_N)[:, None])
        return grad_Nv, None, None, None


def slice_offset(vocabulary: int, group: Group) -> int:
    """The first token of this rank's slice of `vocabulary`."""
    return -(-vocabulary // dist.get_world_size(group)) * dist.get_rank(group)


def sliced_logprobs(logits_Nv: Tensor, targets_N: Tensor, vocabulary: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of `targets_N` and entropies of the distributions, in nats; fp32, [N] each.

    Args:
        logits_Nv: this rank's slice of the fp32 logits: ceil(V / ranks) of `vocabulary` V, fewer on the last ranks.
    """
    offset = slice_offset(vocabulary, group)
    result: tuple[Tensor, Tensor] = _Logprobs.apply(logits_Nv, targets_N, offset, group)  # type: ignore[no-untyped-call]
    return result
