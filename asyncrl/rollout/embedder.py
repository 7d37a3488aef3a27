"""Optional: embeddings of episodes' frames for rewards of groups, by EncoderServers (`rollout.encoder.servers`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from asyncrl.api.picture import Picture, evenly
from asyncrl.comm import names
from asyncrl.comm.http_client import JsonHttp
from asyncrl.inference.encoder.client import EncoderClient, EncoderUnavailable
from asyncrl.rollout.user_code.rewards import Embedder
from asyncrl.rollout.user_code_pool.call_records import UserCodeError
from asyncrl.runtime.process.worker import AsyncWorker


@asynccontextmanager
async def embedder(worker: AsyncWorker) -> AsyncIterator[Embedder]:
    """Yield an embedder that asks the EncoderServers that are registered where `worker` looks for them."""
    config = worker.config.rollout.encoder
    servers = await asyncio.to_thread(worker.resolver.follow, names.ENCODER_SERVERS)
    http = JsonHttp(worker.http_security)
    client = EncoderClient(http, servers.entries, config.timeout_s)

    async def embed(episodes: Sequence[Sequence[Picture]]) -> list[tuple[float, ...]]:
        clips = [[each[-1]] * config.frames if config.end else evenly(each, config.frames) for each in episodes]
        try:
            return [tuple(vector) for vector in await client.embed(clips)]
        except EncoderUnavailable as error:
            raise UserCodeError(f"encoder {config.path}", f"gave no embeddings: {error}") from error

    try:
        yield embed
    finally:
        await http.close()
