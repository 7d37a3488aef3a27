"""Embeddings of a group's episodes, from EncoderServers, for rewards that compare them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from asyncrl.api import Episode
from asyncrl.api.picture import Picture, evenly
from asyncrl.comm import names
from asyncrl.comm.http.calls import JsonHttp
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.security.run_secret import HttpSecurity
from asyncrl.inference.encoder.client import EncoderClient, EncoderUnavailable
from asyncrl.inference.encoder.settings import EncoderConfig
from asyncrl.rollout.user_code_pool.user_code_errors import UserCodeError

Embedder = Callable[[Sequence[Sequence[Picture]]], Awaitable[list[tuple[float, ...]]]]
"""Embeds the frames of N episodes: `[N, D]`."""


async def with_embeddings(group: Sequence[Episode], embedder: Embedder) -> list[Episode]:
    """Return the samples of `group` with the embeddings of their episodes; an episode without frames has none.

    Raises:
        UserCodeError: the frames could not be embedded.
    """
    frames: dict[int, list[Picture]] = {}
    for sample in group:
        if sample.frames:
            frames.setdefault(sample.episode, []).extend(sample.frames)
    vectors = dict(zip(frames, await embedder(list(frames.values())), strict=True)) if frames else {}
    return [replace(sample, embedding=vectors.get(sample.episode, ())) for sample in group]


@asynccontextmanager
async def embedder_at(
    resolver: NameResolver, config: EncoderConfig, security: HttpSecurity | None
) -> AsyncIterator[Embedder | None]:
    """Yield an embedder that asks the registered EncoderServers; None if the run has none."""
    if not config.servers:
        yield None
        return
    servers = await asyncio.to_thread(resolver.follow, names.ENCODER_SERVERS)
    http = JsonHttp(security)
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
