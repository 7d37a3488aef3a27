"""The sharded engine: a model over pipeline stages, tensor slices and fully sharded data-parallel ranks.

Each rank has the layers of one stage, one tensor slice of each layer, and one FSDP part of each slice. FSDP2 gathers a
layer's parts over the data-parallel ranks when the layer is computed, and reduces its gradients back into parts. All
ranks of one data-parallel copy have the same samples and cut them into the same micro-batches. A rank may compute only
a part of a micro-batch's tokens (`context_parallel`). The last stage sends its outputs to the others. So an engine
returns the same on all ranks of a copy, and a model function does not depend on the layout. The optimizer is torch's
fused AdamW on each rank's own parts.

Data-parallel ranks must run equally many micro-batches, or FSDP2's collectives would not match. A rank with fewer runs
fillers of one token whose outputs are ignored. What is not documented here is in `asyncrl.trainer.engines.base`.

Pipelines
---------
Micro-batches run through the stages: activations one way, their gradients the other.

All stages cut the same samples into the same micro-batches, so each knows the shape of what its neighbour sends, and no
shape is transmitted. Sends are awaited at the step's end only. Activations and gradients have separate groups, so a
send in one direction never blocks one in the other.

The schedule is one forward, one backward (`one_forward_one_backward`; Narayanan et al., "PipeDream-2BW", 2021): a stage
first runs as many forward passes as there are stages after it, then alternates, then runs the remaining backward
passes. So it keeps the activations of at most as many micro-batches as there are stages from it to the last. Every
stage sends in the order in which its neighbour receives, so stages never deadlock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from asyncrl.algorithms.arithmetic import Stat, Stats, merge_stats
from asyncrl.trainer.batches.micro_batch import MicroBatch, one_micro_batch
from asyncrl.trainer.engines.base import PolicyEngine
from asyncrl.trainer.engines.optimizer import (
    EngineOptimizer,
    NamedParameter,
    decay_groups,
    local,
    trainable,
    zero_moments,
)
from asyncrl.trainer.engines.role import Finish, Outputs, RoleEngine, RolePolicy, RoleValue
from asyncrl.trainer.engines.sharded.build import (
    BuildPlan,
    Built,
    Gathering,
    several_collectives_expected,
    whole,
)
from asyncrl.trainer.engines.sharded.context_parallel import cut_to_part
from asyncrl.trainer.model.lora import Merged, is_adapter
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import OptimizerConfig
from asyncrl.weights.adapters import published_name
from asyncrl.weights.folder_tensors import Published


@dataclass(frozen=True)
class PipelineGroups:
    """The pipeline's groups; both list the stages in order.

    Attributes:
        forwards: carries activations, and the last stage's results.
        backwards: carries gradients.
    """

    stage: int
    stages: int
    forwards: dist.ProcessGroup
    backwards: dist.ProcessGroup

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast `tensor` of the last stage, in place on the others."""
        dist.broadcast(tensor, group=self.forwards, group_src=self.stages - 1)
        return tensor

    def share_statistics(self, loss: Tensor, stats: Stats) -> tuple[float, Stats]:
        """Return the last stage's loss and statistics on all stages; the others' arguments are ignored."""
        document = [float(loss), {key: (float(s.total), float(s.count), s.kind) for key, s in stats.items()}]
        data = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        size = self.broadcast(torch.tensor([len(data)]))
        received = self.broadcast(data if self.stage == self.stages - 1 else torch.empty(int(size), dtype=torch.uint8))
        total, table = json.loads(received.numpy().tobytes())
        return total, {
            key: Stat(torch.tensor(value, dtype=torch.float64), torch.tensor(count, dtype=torch.float64), kind)
            for key, (value, count, kind) in table.items()
        }


@dataclass
class Pipeline:
    """One step on this stage.

    Args:
        forward: the stage's forward pass, of a micro-batch and the hidden states of the stage before.
        backward: the backward pass of an output, given its gradient (None for a loss) and whether it is the last.
        hidden_size, dtype: size and type of the tensors sent between stages.
    """

    groups: PipelineGroups
    forward: Callable[[MicroBatch, Tensor | None], Any]
    backward: Callable[[Tensor, Tensor | None, bool], None]
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    _sends: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def run(self, micro_batches: Sequence[MicroBatch], finish: Finish) -> None:
        """Run all micro-batches; forward passes only if gradients are switched off.

        Args:
            finish: computes the loss from the last stage's outputs; called on that stage only.
        """
        if torch.is_grad_enabled():
            self._forward_and_backward(micro_batches, finish)
        else:
            for micro_batch in micro_batches:
                _, output = self._run_forward(micro_batch, finish)
                self._pass_on(output)
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _forward_and_backward(self, micro_batches: Sequence[MicroBatch], finish: Finish) -> None:
        in_flight: dict[int, tuple[Tensor | None, Tensor]] = {}
        groups = self.groups
        for index in one_forward_one_backward(groups.stage, groups.stages, len(micro_batches)):
            if index not in in_flight:
                hidden, output = in_flight[index] = self._run_forward(micro_batches[index], finish)
                self._pass_on(output)
                continue
            hidden, output = in_flight.pop(index)
            grad = None if self._is_last else self._receive(output.shape, groups.stage + 1, groups.backwards)
            self.backward(output, grad, index == len(micro_batches) - 1)
            if hidden is not None:
                assert hidden.grad is not None
                self._send(hidden.grad, groups.stage - 1, groups.backwards)

    @property
    def _is_last(self) -> bool:
        return self.groups.stage == self.groups.stages - 1

    def _run_forward(self, micro_batch: MicroBatch, finish: Finish) -> tuple[Tensor | None, Tensor]:
        """Run one forward pass. Return the received hidden states (None on the first stage), and the hidden states to
        send or the loss.
        """
        groups, hidden = self.groups, None
        if groups.stage > 0:
            rows, width = micro_batch.model_inputs["input_ids"].shape
            hidden = self._receive((rows, width, self.hidden_size), groups.stage - 1, groups.forwards)
            hidden.requires_grad_(torch.is_grad_enabled())
        output = self.forward(micro_batch, hidden)
        return hidden, finish(micro_batch, output) if self._is_last else output

    def _pass_on(self, output: Tensor) -> None:
        if not self._is_last:
            self._send(output.detach(), self.groups.stage + 1, self.groups.forwards)

    def _send(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        tensor = tensor.to(self.dtype).contiguous()
        work = dist.isend(tensor, group=group, group_dst=stage)
        assert work is not None  # None is for ranks outside the group
        self._sends.append((work, tensor))  # gloo reads the tensor until the work is done

    def _receive(self, shape: Sequence[int], stage: int, group: dist.ProcessGroup) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
        dist.recv(tensor, group=group, group_src=stage)
        return tensor


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[int]:
    """Yield the index of the micro-batch of each pass of `stage`, in the order of execution: each index comes twice,
    first for its forward pass, then for its backward pass.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    yield from range(ahead)
    for index in range(micro_batches):
        if index + ahead < micro_batches:
            yield index + ahead
        yield index


class ShardedAdamW(EngineOptimizer):
    """AdamW over parts.

    Args:
        parameters: (name in the model folder, parameter) pairs of this rank's stage; DTensors on one mesh.
        counted: names of the parameters that count in the norm; a parameter of two stages counts once.
        pipeline: ranks over which the norm is summed; None if there is one stage.
        undecayed: names of parameters without weight decay, besides norms and biases.

    Raises:
        ValueError: there is no trainable parameter.
    """

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        config: OptimizerConfig,
        *,
        counted: frozenset[str],
        pipeline: dist.ProcessGroup | None,
        undecayed: Collection[str] = (),
    ) -> None:
        self._parameters = dict(trainable(parameters))
        self._counted, self._pipeline = counted, pipeline
        self._moments = {name: zero_moments(parameter, config) for name, parameter in self._parameters.items()}
        groups = decay_groups(self._parameters.items(), undecayed).with_decay(config.weight_decay)
        super().__init__(
            [([(parameter, self._moments[name]) for name, parameter in named], decay) for named, decay in groups],
            config,
        )

    def zero_grad(self) -> None:
        self._adamw.zero_grad()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"weights.{name}": parameter.detach() for name, parameter in self._parameters.items()}
        for name, moments in self._moments.items():
            tensors |= {f"{moment}.{name}": kept for moment, kept in moments.items()}
        return tensors, {"step": self.steps}

    def load_state(self, meta: Mapping[str, Any]) -> None:
        self.resume(meta)

    def _norm(self) -> Tensor:
        grads = [p.grad for name, p in self._parameters.items() if name in self._counted and p.grad is not None]
        device = next(iter(self._parameters.values())).device
        square = torch.zeros((), device=device)
        if grads:
            norm = nn.utils.get_total_norm(grads)
            square = whole(norm) ** 2
        if self._pipeline is not None:
            dist.all_reduce(square, group=self._pipeline)
        return square.sqrt()

    def _clipped(self) -> Iterable[Tensor]:
        """This rank's own parts, for the reason of `_AdamW`."""
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                part = local(parameter.detach())
                part.grad = local(parameter.grad)
                yield part


class ShardedEngine(RoleEngine[ShardedAdamW]):
    """Base of the sharded policy and value engines: a stage, its pipeline, and its optimizer if it is trained.

    Args:
        pipeline_groups: this rank's pipeline; None if there is one stage.
        tied_stages: first and last stage, if each has a copy of a tied embedding.
        optimizer: its settings; None for a frozen role.
    """

    def __init__(
        self,
        built: Built,
        plan: BuildPlan,
        *,
        position: RankPosition,
        pipeline_groups: PipelineGroups | None,
        tied_stages: dist.ProcessGroup | None,
        optimizer: OptimizerConfig | None,
        **role: Any,
    ) -> None:
        self._built, self._plan = built, plan
        self.stage = built.stage
        # Now, while parameters are parts: between passes FSDP2 may keep the embedding and head whole.
        self._parameters = {built.names[name]: parameter for name, parameter in built.stage.named_parameters()}
        self._pipeline_groups, self._tied_stages = pipeline_groups, tied_stages
        super().__init__(
            device=plan.device,
            attention=plan.attention.kind,
            optimizer=None if optimizer is None else self._make_optimizer(optimizer),
            position=position,
            routers=built.routers,
            pictures=built.pictures,
            **role,
        )
        if self.stage.position.first:
            self.stage.seeing = self.seeing
        if optimizer is None:
            self.stage.requires_grad_(False)
        self._count_from_now(built.stage.trunk)

    @property
    def root(self) -> nn.Module:
        return self.stage

    def _leave(self) -> None:
        super()._leave()
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        self._reshard()

    def load_state(self, meta: Mapping[str, Any]) -> None:
        super().load_state(meta)
        self._reshard()

    def _reshard(self) -> None:
        """Free the embedding and head that FSDP2 keeps whole after a forward pass: their parts change or are
        off-loaded.
        """
        for module in self.stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._parameters

    @property
    def model_config(self) -> PretrainedConfig:
        config: PretrainedConfig = self._built.model.config
        return config

    def _make_optimizer(self, config: OptimizerConfig) -> ShardedAdamW:
        parameters = self.parameters()
        counted = frozenset(parameters)
        if self._tied_stages is not None and self.stage.position.last:
            counted -= {str(self._built.tied)}
        pipeline = None if self._pipeline_groups is None else self._pipeline_groups.forwards
        embeddings = () if config.decay_embeddings else self._built.embeddings
        return ShardedAdamW(parameters.items(), config, counted=counted, pipeline=pipeline, undecayed=embeddings)

    def _fillers(self, number: int) -> list[MicroBatch]:
        """Return empty micro-batches for this rank if another data-parallel rank has more than its `number`."""
        most = int(self._position.data.all_reduce_max(torch.tensor([number])))
        if most == number:
            return []
        return [one_micro_batch([[0, 0]], self.attention, self.device, wanted=True)] * (most - number)

    def _run(self, own: Iterable[MicroBatch], finish: Finish, **outputs: Any) -> None:
        """See `RoleEngine`; on a pipeline's last stage alone there are outputs to finish."""
        own = list(own)
        everything = [cut_to_part(each, self._position.context) for each in (*own, *self._fillers(len(own)))]
        whole = {id(cut): each for cut, each in zip(everything, own, strict=False)}

        def finish_any(micro_batch: MicroBatch, out: Outputs) -> Tensor:
            if id(micro_batch) in whole:
                return finish(whole[id(micro_batch)], out)
            return cast(Tensor, sum(tensor.sum() * 0.0 for tensor in out))

        if self._pipeline_groups is None:
            for number, micro_batch in enumerate(everything):
                loss = finish_any(micro_batch, self._forward(micro_batch, **outputs))
                if torch.is_grad_enabled():
                    self._backward(loss, None, number == len(everything) - 1)
            return
        pipeline = Pipeline(
            self._pipeline_groups,
            forward=lambda micro_batch, hidden: self._forward(micro_batch, hidden, **outputs),
            backward=self._backward,
            hidden_size=self._built.model.config.get_text_config().hidden_size,
            dtype=self._plan.dtype,
            device=self.device,
        )
        pipeline.run(everything, finish_any)

    def _forward(self, micro_batch: MicroBatch, hidden: Tensor | None = None, **outputs: Any) -> Any:
        self.pieces += 1
        with self.router_replay(micro_batch):
            return self.stage(micro_batch, hidden, **outputs)

    def _backward(self, output: Tensor, grad: Tensor | None, last: bool) -> None:
        cast(FSDPModule, self.stage).set_is_last_backward(last)
        torch.autograd.backward(output, grad)

    def _accumulate(self, *given: Any, **outputs: Any) -> tuple[Tensor, list[Stats]]:
        """See `RoleEngine`; also sum the gradients that FSDP2 does not, and share the last stage's results."""
        total, stats = super()._accumulate(*given, **outputs)
        if torch.is_grad_enabled() and self._tied_stages is not None:
            grad = self.parameters()[str(self._built.tied)].grad
            assert grad is not None
            dist.all_reduce(local(grad), group=self._tied_stages)
        if torch.is_grad_enabled() and self._plan.lora is not None:
            self._sum_adapters()
        if self._pipeline_groups is None:
            return total, stats
        loss, merged = self._pipeline_groups.share_statistics(total, merge_stats(stats))
        return torch.tensor(loss, device=self.device), [merged] if merged else []

    def _collect(self, *given: Any, **outputs: Any) -> Tensor:
        """See `RoleEngine`; all stages return the last one's column."""
        column_T = super()._collect(*given, **outputs)
        return column_T if self._pipeline_groups is None else self._pipeline_groups.broadcast(column_T)

    def _sum_adapters(self) -> None:
        """Sum the adapters' gradients, which FSDP2 does not handle, over the data- and context-parallel ranks."""
        grads: list[Tensor] = []
        for parameter in self.parameters().values():
            grad = parameter.grad
            if grad is None:
                continue
            if isinstance(parameter, DTensor):  # its slice's gradient may be of this rank's heads only
                with several_collectives_expected():
                    grad = parameter.grad = cast(DTensor, grad).redistribute(placements=parameter.placements)
            grads.append(local(grad))
        if grads:
            together = self._position.data.all_reduce_sum(torch.cat([own.flatten() for own in grads]))
            together = self._position.context.all_reduce_sum(together)
            for own, summed in zip(grads, torch.split(together, [own.numel() for own in grads]), strict=True):
                own.copy_(summed.view_as(own))


class ShardedPolicyEngine(ShardedEngine, RolePolicy[ShardedAdamW]):
    """A causal language model."""

    def __init__(self, built: Built, plan: BuildPlan, **engine: Any) -> None:
        super().__init__(built, plan, **engine)
        mine: dict[str, Tensor] = {**self.parameters(), **built.buffers}
        mine |= {published_name(name): parameter for name, parameter in self.parameters().items() if is_adapter(name)}
        published, adapters = (
            Gathering(specs, built.stages, built.folder, mine, self._position, self.device)
            for specs in (built.published, built.adapters)
        )
        self._published = published if plan.lora is None else adapters
        if plan.lora is not None and plan.merge:
            self._published = Merged(published, adapters, plan.lora, built.folder.values(), self.model_config)

    def distributions(self, micro_batch: MicroBatch) -> Tensor:
        """Refuse: this engine does not compute whole distributions.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("whole distributions (kl=full) are known to trainer.engine=flat only")

    def average_towards(self, source: PolicyEngine, decay: float) -> None:
        """See `PolicyEngine`; `source` is a trained engine of the same layout, whose fp32 values count."""
        from asyncrl.algorithms.kl import ema_update_  # only with algorithm.reference.mode=ema

        assert isinstance(source, ShardedPolicyEngine), type(source)
        mine, theirs = self.parameters(), source.parameters()
        self._before_changes()
        self._reshard()
        own, moved = ({name: local(each.detach()) for name, each in part.items()} for part in (mine, theirs))
        ema_update_(own, moved, decay)
        self._weights_changed()


class ShardedValueEngine(ShardedEngine, RoleValue[ShardedAdamW]):
    """A critic or reward model."""

    @cached_property
    def _published(self) -> Published:
        built = self._built
        if not built.published:
            return super()._published
        mine: dict[str, Tensor] = {built.in_folder[name]: parameter for name, parameter in self.parameters().items()}
        mine |= built.buffers
        return Gathering(built.published, built.stages, built.folder, mine, self._position, self.device)
