"""Publish versions of a policy to the servers: as folders, and from this rank's memory."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch

from asyncrl.comm.security import HttpSecurity
from asyncrl.config.context import context_length
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import ANNOUNCED_DIR, WEIGHTS_DIR
from asyncrl.config.setting import Dtype
from asyncrl.models.weights.transports.base import TrainerEnd, weight_transport
from asyncrl.models.weights.versions import publishing
from asyncrl.models.weights.versions.logprob_probe import LogprobProbe, probe_picture, probe_tokens, with_picture
from asyncrl.models.weights.versions.published import Published, Rounded
from asyncrl.models.weights.versions.shared_files import SharedFiles
from asyncrl.trainer.engines.base import PolicyEngine
from asyncrl.trainer.messages import CollectWeights, Publish
from asyncrl.trainer.model.lora import adapter_config
from asyncrl.trainer.model.lora_checks import publishes_adapters
from asyncrl.trainer.parallel.rank_position import World
from asyncrl.trainer.rank.training_rank import TrainingRank


class Versions:
    """This rank's part of publishing versions.

    Args:
        security: the servers' token and certificate.
        device: device of the rank.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: Path,
        world: World,
        rank: TrainingRank,
        security: HttpSecurity | None,
        device: torch.device,
    ) -> None:
        self._config, self._run_dir, self._world, self._rank = config, run_dir, world, rank
        self._assets = publishing.tokenizer_assets(Path(str(config.model.path)))
        self._shared: dict[str, SharedFiles] = {}
        self._transport = weight_transport(config.manager.weight_transport)
        self.to_servers = TrainerEnd()
        """Sender of versions from memory to servers; used on the request server's loop."""
        if world.publishes:
            self.to_servers = self._transport.trainer_end(config, security, device)

    def publish(self, request: Publish) -> Path:
        """Make a version available, on disk if `to_disk`, and in memory if servers get it from there; return its
        folder.

        Called by all ranks of the role.
        """
        policy = self._rank.policy(request.role)
        with policy.on_device():
            return self._publish_resident(request, policy)

    def collect(self, request: CollectWeights) -> None:
        """Remove all versions but those that `request` keeps."""
        if self._world.worker == self._world.placement.grid(request.role).publisher:  # others may be writing one
            for root in (WEIGHTS_DIR, ANNOUNCED_DIR):
                publishing.collect(self._run_dir / root, request.role, request.keep)
        if self._world.publishes:
            self.to_servers.keep(request.keep)

    def _publish_resident(self, request: Publish, policy: PolicyEngine) -> Path:
        probe = self._probe(policy)
        published = self._published(policy)
        if not self._transport.needs_folders:
            owners = dict.fromkeys(
                (spec.name for spec in published.published_specs()), self._world.placement.actor.publisher
            )
            self.to_servers.hold(request.version, published.gather(owners))
        if request.role not in self._shared:
            self._shared[request.role] = self._shared_files(policy)
        return publishing.publish(
            published,
            self._run_dir / (WEIGHTS_DIR if request.to_disk else ANNOUNCED_DIR),
            role=request.role,
            version=request.version,
            ranks=self._world.place(request.role).everyone,
            shared=self._shared[request.role] if request.to_disk else None,
            probe=probe,
            first_worker=self._world.place(request.role).grid.first,
        )

    def _published(self, policy: PolicyEngine) -> Published:
        """Return the tensors of `policy` in the type in which versions are published."""
        chosen = self._config.model.publish_dtype
        return policy if chosen == Dtype.auto else Rounded(policy, getattr(torch, chosen))

    def _shared_files(self, policy: PolicyEngine) -> SharedFiles:
        """Return the files beside the weights, the same for every version of `policy`."""
        if not publishes_adapters(self._config):
            described = deepcopy(policy.model_config)
            if self._config.model.publish_dtype != Dtype.auto:
                described.dtype = getattr(torch, self._config.model.publish_dtype)
            return SharedFiles(described, self._assets)
        base, specs = str(Path(str(self._config.model.path))), policy.published_specs()
        return SharedFiles(adapter_config(self._config.model.lora, base, specs, policy.model_config))

    def _probe(self, policy: PolicyEngine) -> LogprobProbe | None:
        """Return the probe of the current `policy`; None if probes are off, or if the sequences leave no room for
        a probe.
        """
        model_config = policy.model_config
        context = context_length(self._config, model_config.to_dict())
        vocabulary = model_config.get_text_config().vocab_size
        tokens = probe_tokens(vocabulary, context)
        if not tokens or self._config.manager.logprob_check_tolerance == 0:
            return None
        picture = probe_picture()
        transport = self._config.manager.weight_transport
        served = self._config.generation.engine.takes_pictures(transport, model_config.model_type)
        placeholders = policy.placeholders(picture) if served else []
        shown = with_picture(vocabulary, context, placeholders, picture) if placeholders else None
        if shown is None:
            return LogprobProbe.of(tokens, policy.score_sequences(tokens))
        prompt, placed = shown
        sequences, pictures = [*tokens, prompt], [*((),) * len(tokens), (placed,)]
        return LogprobProbe.of(sequences, policy.score_sequences(sequences, pictures), placed)
