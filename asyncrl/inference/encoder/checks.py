"""Checks of the settings of EncoderServers."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.import_paths import path_problems
from asyncrl.inference.encoder.settings import EncoderConfig

_FROM_SERVERS = "server"
"""`encoder` in the arguments of a reward that uses `Episode.embedding`."""


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting of `rollout.encoder`."""
    encoder = config.rollout.encoder
    given = enumerate(config.rewards) if config.rewards else [("", config.reward)]
    for number, reward in given:
        group = f"rewards[{number}]" if config.rewards else "reward"
        if reward.args.get("encoder") == _FROM_SERVERS and not encoder.servers:
            yield (
                f"rollout.encoder.servers=0: {group}.args has encoder={_FROM_SERVERS!r}; start one, or name the "
                "reward's own encoder"
            )
    if not encoder.servers:
        return
    yield from path_problems("rollout.encoder", encoder.path)
    device = str(encoder.args.get("device", "cpu"))
    if device != "cpu" and not encoder.gpus:
        yield f"rollout.encoder.args has device={device!r}, and rollout.encoder.gpus is 0; set it to 1"
    if encoder.gpus and device == "cpu" and encoder.path == EncoderConfig().path:
        yield (
            f"rollout.encoder.gpus={encoder.gpus}: rollout.encoder.args has no device, so it computes on the CPU; add "
            "device: cuda"
        )
