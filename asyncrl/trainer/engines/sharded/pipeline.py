"""Run micro-batches through the stages of a pipeline: activations one way, their gradients the other.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.algorithms.arithmetic import Stat, Stats
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.engines.role import Finish


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
        for action in one_forward_one_backward(groups.stage, groups.stages, len(micro_batches)):
            if isinstance(action, Forward):
                hidden, output = self._run_forward(micro_batches[action.index], finish)
                in_flight[action.index] = hidden, output
                self._pass_on(output)
                continue
            hidden, output = in_flight.pop(action.index)
            grad = None if self._is_last else self._receive(output.shape, groups.stage + 1, groups.backwards)
            self.backward(output, grad, action.index == len(micro_batches) - 1)
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


@dataclass(frozen=True, slots=True)
class Forward:
    """Run micro-batch `index` forward."""

    index: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run micro-batch `index` backward."""

    index: int


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Forward | Backward]:
    """Yield the passes of `stage` in the order of their execution; forward and backward passes each in ascending order
    of micro-batches.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    yield from map(Forward, range(ahead))
    for index in range(micro_batches):
        if index + ahead < micro_batches:
            yield Forward(index + ahead)
        yield Backward(index)
