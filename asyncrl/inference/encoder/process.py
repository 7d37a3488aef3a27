"""EncoderServer: one frozen encoder of episodes' frames behind HTTP, found by name resolution.

Its only state is a cache, so it restarts alone: RolloutWorkers wait for its new address.
"""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.comm import names
from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin
from asyncrl.config.setting import ConfigError
from asyncrl.inference.encoder.service import Encode, EncoderService
from asyncrl.inference.encoder.settings import EncoderConfig
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.runtime.process.hardware import visible_gpus
from asyncrl.runtime.process.worker import AsyncWorker


class EncoderServer(AsyncWorker):
    """Process that embeds clips for RolloutWorkers."""

    async def main(self) -> None:
        """Serve until a stop is requested."""
        config = self.config.rollout.encoder
        if config.gpus and not visible_gpus():
            raise ConfigError(f"rollout.encoder.gpus={config.gpus}: {self.name} sees no GPU on its host; set 0")
        observer.stage("loads the encoder")
        encode = await asyncio.to_thread(loaded, config)
        service = EncoderService(
            encode, label=config.path, batch=config.batch, cached=config.cached, security=self.http_security
        )
        try:
            url = await service.http.start(self.config.system.host)
            key, lease_s = names.encoder_server_key(self.index), self.config.system.lease_s
            self.resolver.add(key, url, lease_s=lease_s, replace=True)
            self.ready()
            observer.stage(observer.SERVES, Activity.serves)
            observer.gauges(
                lambda: {
                    "encoded_total": service.encoded,
                    "encoder_hits_total": service.cache.hits,
                    "encoder_waiting": service.waiting,
                }
            )
            await self.stop.wait()
        finally:
            await service.close()


def loaded(config: EncoderConfig) -> Encode:
    """Return the encoder that the settings name.

    Raises:
        ConfigError: the path does not name a callable, or the class rejects its arguments.
    """
    try:
        named: Any = load_plugin(config.path)
    except PluginError as error:
        raise ConfigError(f"rollout.encoder.path={error}") from error
    try:
        encode: Any = named(**config.args) if isinstance(named, type) else named
    except Exception as error:  # a user's constructor may raise anything
        given = f"rollout.encoder.path={config.path!r}, rollout.encoder.args={dict(config.args)}"
        raise ConfigError(f"{given}: {type(error).__name__}: {error}") from error
    if not callable(encode):
        raise ConfigError(f"rollout.encoder.path={config.path!r}: it is a {type(named).__name__}; name a function")
    if not isinstance(named, type) and config.args:
        raise ConfigError(f"rollout.encoder.args={dict(config.args)}: {config.path!r} is a function, and takes none")
    made: Encode = encode
    return made
