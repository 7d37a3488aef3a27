"""Embeddings of the frames of episodes by EncoderServers, for rewards that compare the episodes of a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeAlias

from asyncrl.api import Episode
from asyncrl.api.picture import Picture, evenly
from asyncrl.comm import names
from asyncrl.comm.http_client import JsonHttp
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.security import HttpSecurity
from asyncrl.inference.encoder.client import EncoderClient, EncoderUnavailable
from asyncrl.rollout.settings import EncoderConfig
from asyncrl.rollout.user_code_pool.call_records import UserCodeError

Embedder: TypeAlias = Callable[[Sequence[Sequence[Picture]]], Awaitable[list[tuple[float, ...]]]]
"""Embeds the frames of N episodes: `[N, D]`."""


@asynccontextmanager
async def embedder_of(
    config: EncoderConfig, resolver: NameResolver, security: HttpSecurity | None
) -> AsyncIterator[Embedder]:
    """Yield an embedder that asks the registered EncoderServers."""
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
