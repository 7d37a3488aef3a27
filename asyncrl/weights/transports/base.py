"""The parts of a weight transport: a description for the settings, the manager's end and the trainer's end. These base
classes are the transport by disk; others override them.

    manager ── pause ──▶ server                                       manager.fleet decides, and carries this out
    manager ── ManagerEnd.bring(server, version) ──▶ ...              the transport
    manager ── continue, probe ──▶ server                            manager.fleet again

Transports differ only in `bring`: a server reads the version's folder (`disk`), or the trainer sends the weights that
it holds in memory (`from_memory`). Pausing, versions, the probe and quarantine are the same.

Only functions that the trainer calls import torch: launcher and manager import these modules too.

By disk, servers read the version's folder, which the trainer writes (`weights.publishing`). This works with any engine,
wherever the file system is shared. An SGLang server reads the folder by SGLang's own code. The embedded engine reads it
by `weights.loading`, which checks everything before it touches the model.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from asyncrl.comm.security import HttpSecurity
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.client import GenerationServerClient
from asyncrl.trainer.client import PublisherClient
from asyncrl.trainer.messages import SendWeights
from asyncrl.weights.transports import TRANSPORTS

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ManagerEnd:
    """Brings a paused server to a version. By disk: sends it the path of the folder."""

    async def bring(
        self, client: GenerationServerClient, order: SendWeights, path: str, sending: Callable[[], None]
    ) -> None:
        """Carry out `order` for the server of `client`, without a limit of time; returns once the server names the
        version.

        Args:
            path: the version's folder.
            sending: called from time to time while the trainer sends.

        Raises:
            HttpError: the update failed; the server's weights are unknown.
        """
        await client.update_weights(path, order.version, keep_cache=order.keep_cache, timeout_s=math.inf)


class TrainerEnd:
    """The publishing process's part of a transport, besides writing folders. By disk: nothing."""

    def hold(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keep a copy of `tensors`, by their names in a Hugging Face folder, as `version`.

        Iterate over all of them even if none is kept, because all ranks gather them together.
        """
        for _ in tensors:
            pass

    def keep(self, versions: Collection[int]) -> None:
        """Forget all other versions."""

    async def send(self, order: SendWeights) -> None:
        """Bring the paused server of `order` to the version of `order`.

        Raises:
            LookupError: the version is not held.
            HttpError: the server did not accept the weights.
            RuntimeError: this process sends no weights.
        """
        raise RuntimeError(
            "this process sends no weights; set manager.weight_transport, and ask the one that publishes"
        )

    async def close(self) -> None:
        """Close all connections."""


class WeightTransport:
    """A transport; `name` is its value of `manager.weight_transport`."""

    needs_folders: ClassVar[bool] = True
    """True if servers read every version's folder; else they are sent it, and a folder is written only with checkpoints
    and at the end.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def check(self, config: ExperimentConfig) -> Iterator[str]:
        """Yield an error message for each setting that does not work with this transport."""
        return iter(())

    def manager_end(self, publisher: PublisherClient) -> ManagerEnd:
        """Return the manager's end, which calls `publisher` if the trainer has to send something."""
        return ManagerEnd()

    def trainer_end(self, config: ExperimentConfig, security: HttpSecurity | None, device: torch.device) -> TrainerEnd:
        """Return the publishing process's end, for one running loop.

        Args:
            security: the servers' token and certificate.
            device: device of the trainer.
        """
        return TrainerEnd()


def weight_transport(name: str) -> WeightTransport:
    """Return the transport of the setting's value `name`."""
    transport: WeightTransport = pkgutil.resolve_name(TRANSPORTS[name])(name)
    return transport
