"""Models of servers and trainers, derived from figures of a language model and of a device.

Decoding is bound by memory: a step reads the weights once and every sequence's keys and values, and computes two
operations a parameter for each sequence. Prefill and training are bound by computation. With `tensor` devices to a
server each holds a share of weights and keys, and each layer adds two all-reduces to a step.

For n sequences with C tokens of context on t devices, without the host's part:

    weights / (t bandwidth READ_SHARE) + n 2 P / (t FLOP/s PREFILL_SHARE) + C kv / (t bandwidth KV_READ_SHARE)
    + all-reduces
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from simulator.setup import EngineModel, TrainerModel

READ_SHARE = 0.8
"""Share of the memory's bandwidth that a decode step attains for weights, and `KV_READ_SHARE` for keys and values."""
KV_READ_SHARE = 0.6
PREFILL_SHARE = 0.5
"""Share of the device's peak that prefill and a batch's decoding attain."""
TRAIN_SHARE = 0.4
"""Share of the device's peak that training attains (model FLOPs utilisation)."""
TRAIN_OPERATIONS = 8
"""For a token and parameter: 2 forward, 4 backward, 2 for the proximal log-probabilities."""
LAUNCH_S = 0.001
"""Seconds that the host adds to a decode step: scheduling, sampling, launches."""
MEMORY_SHARE = 0.88
"""Share of the device's memory that weights, keys and values may take."""
STEP_OVERHEAD_S = 2.0
"""Seconds that a train step takes beside its computation: packing, optimizer, pipeline's ends, metrics."""


@dataclass(frozen=True, slots=True)
class Device:
    """Bytes, bytes/s, operations/s in bfloat16; bytes/s at which a server's device loads weights; seconds of a small
    all-reduce over two devices, of which log₂ of twice the devices are counted."""

    memory: float
    bandwidth: float
    operations: float
    load_bandwidth: float
    all_reduce_s: float


H100 = Device(memory=80e9, bandwidth=3.35e12, operations=989e12, load_bandwidth=4e9, all_reduce_s=12e-6)
"""SXM, dense bfloat16. Weights arrive over the network or a page cache at 4 GB/s a device."""


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters; layers, heads of keys and values and their size. Two bytes a number."""

    name: str
    parameters: float
    layers: int
    kv_heads: int
    head_size: int

    @property
    def weight_bytes(self) -> float:
        return 2 * self.parameters

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values of a token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


QWEN_1B = Model("1.5B", 1.54e9, 28, 2, 128)
QWEN_7B = Model("7B", 7.6e9, 28, 4, 128)


def engine_model(model: Model, device: Device, tensor: int) -> EngineModel:
    """A server of `tensor` devices."""
    operations = 2 * model.parameters / (tensor * device.operations * PREFILL_SHARE)
    reduces = 2 * model.layers * device.all_reduce_s * math.log2(2 * tensor) if tensor > 1 else 0.0
    free = MEMORY_SHARE * tensor * device.memory - model.weight_bytes
    if free <= 0:
        raise ValueError(f"{model.name} does not fit on {tensor} devices")
    return EngineModel(
        step_s=LAUNCH_S + reduces + model.weight_bytes / (tensor * device.bandwidth * READ_SHARE),
        sequence_s=operations,
        context_s=model.kv_bytes / (tensor * device.bandwidth * KV_READ_SHARE),
        prefill_s=0.002,
        prefill_token_s=operations,
        max_running=256 * tensor,
        kv_tokens=free / model.kv_bytes,
        update_s=0.5 + model.weight_bytes / (tensor * device.load_bandwidth),
    )


def trainer_model(model: Model, device: Device, devices: int) -> TrainerModel:
    """A trainer on `devices` devices."""
    token_s = TRAIN_OPERATIONS * model.parameters / (device.operations * TRAIN_SHARE)
    return TrainerModel(token_s=token_s / devices, fixed_s=STEP_OVERHEAD_S, publish_s=1.0)


def switch_s(model: Model, devices_per_copy: int) -> float:
    """Colocated: the trainer's state leaves the devices and comes back, over PCIe at 25 GB/s a device, both ways."""
    state = 14 * model.parameters / devices_per_copy  # optimizer in float32, weights and gradients in bfloat16
    return 2 * state / 25e9 + 1.0
