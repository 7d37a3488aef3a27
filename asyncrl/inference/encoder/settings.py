"""Settings of the servers that embed episodes' frames."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.setting import PluginConfig, setting


@dataclass
class EncoderConfig(PluginConfig):
    """Servers that embed the frames of training episodes for rewards of groups (`Episode.embedding`)."""

    path: str = setting(
        "asyncrl.plugins.rewards.video_encoder:VJEPA2Encoder",
        "function or class whose calls take N clips, lists of pictures, and return [N, D]; args are the class's",
    )
    servers: int = setting(
        0, "number of EncoderServers; 0: none, and a reward embeds in its own process", minimum=0, maximum=64
    )
    gpus: int = setting(0, "GPUs of each server, besides those of training and generation; 0: CPU", minimum=0)
    frames: int = setting(
        64, "frames of an episode that are embedded together, evenly chosen", unit="frames", minimum=1, maximum=1024
    )
    end: bool = setting(False, "embed only an episode's last frame, repeated; false: frames of the whole episode")
    batch: int = setting(32, "most clips in one call of the encoder; more need more memory", unit="clips", minimum=1)
    cached: int = setting(4096, "most embeddings that a server keeps, the recently used ones", minimum=1)
    timeout_s: float = setting(
        120.0, "limit for a group's embeddings, a server's restart included", unit="s", minimum=1.0
    )
