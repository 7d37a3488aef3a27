"""Explain why a training rank ran out of its device's memory: the work, the memory, and the settings that lower it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory_advice import OUT_OF_MEMORY, in_order, is_out_of_memory, trainer_settings
from asyncrl.runtime.process.torch_device import on_gpu_with_others, shortage
from asyncrl.runtime.process.worker import OutOfMemory
from asyncrl.runtime.ranks import PeerFailed


class MemoryShortage:
    """Turns torch's errors into one message for the user.

    Args:
        name: name of the process.
        device: device of the rank.
        roles: number of models on the rank.
    """

    def __init__(self, config: ExperimentConfig, name: str, device: torch.device, roles: int) -> None:
        self._config, self._name, self._device, self._roles = config, name, device, roles

    @contextmanager
    def explained(self, what: str, *, forward: bool = False, backward: bool = False) -> Iterator[None]:
        """Raise OutOfMemory in place of torch's error within this block. Other errors pass unchanged.

        Args:
            what: the work of the block, for the message.
            forward: it computes with micro-batches.
            backward: it trains with them.

        Raises:
            OutOfMemory: the memory of the device is used up, here or on another rank.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            settings = trainer_settings(
                self._config,
                backward=backward,
                forward=forward,
                on_gpu=self._device.type == "cuda",
                roles=self._roles,
                shared=on_gpu_with_others(self._device),
            )
            if isinstance(error, PeerFailed):
                happened = f"{OUT_OF_MEMORY}: {error}"
            else:
                happened = shortage(self._name, what, self._device, error)
            lower = f"{in_order([*settings])}; --show-allocation prints the need by part"
            raise OutOfMemory.observed(happened, lower) from error
