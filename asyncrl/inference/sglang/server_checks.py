"""Checks of an SGLang server before it gets requests: its answers may span a weight update, and it looks at pictures.

Two prompts of the same token ids with different pictures have to get different log-probabilities. Each weight update
checks that they are the trainer's (`asyncrl.manager.fleet.logprob_check`). The embedded engine proves more at load.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import numpy as np

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.comm.http.calls import HttpError
from asyncrl.comm.security.run_secret import HttpSecurity
from asyncrl.config.context import context_length
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.client import GenerationServerClient, connect
from asyncrl.inference.engine_host import EngineStartError
from asyncrl.inference.sglang.command import pictures_served
from asyncrl.manager.settings import UpdateMode
from asyncrl.models.model_config import read_model_config
from asyncrl.models.pictures.picture_rules import PictureRules, PictureRulesError
from asyncrl.models.weights.versions.logprob_probe import PICTURE_SIDE, probe_picture, with_picture

LEAST_DIFFERENCE = 1e-6
"""In nats: log-probabilities of two pictures that differ by less are taken for equal."""


async def check_server(url: str, config: ExperimentConfig, security: HttpSecurity | None) -> None:
    """Check that the server at `url` can do what the run needs.

    Raises:
        EngineStartError: it cannot, or it does not answer.
    """
    await check_kept_requests(url, config, security)
    await check_pictures(url, config, security)
    await check_head(url, config, security)


async def check_kept_requests(url: str, config: ExperimentConfig, security: HttpSecurity | None) -> None:
    """Check that answers of the server at `url` may span a weight update, if they do in this run.

    Raises:
        EngineStartError: they may not, or the server does not answer.
    """
    mode, generation = config.manager.update_mode, config.generation
    if mode not in (UpdateMode.retract, UpdateMode.in_place):
        return
    try:
        async with connect(url, security) as client:
            fault = await _fault_in_keeping(client, mode, generation.start_timeout_s)
    except HttpError as error:
        raise EngineStartError(f"server {url} does not generate: {error}") from error
    if fault:
        raise EngineStartError(f"manager.update_mode={str(mode)!r}: server {url} {fault}")


async def _fault_in_keeping(client: GenerationServerClient, mode: UpdateMode, timeout_s: float) -> str:
    """Return why answers of this server may not span a weight update of this mode; empty if they may."""
    if not await client.tells_token_versions(timeout_s=timeout_s):
        return (
            "does not say which weights each token of its answers is of (no weight_versions); use SGLang 0.5.20 or "
            "newer, or update_mode=interrupt"
        )
    if mode == UpdateMode.in_place and await client.shares_older_prefixes():
        return (
            "shares cached prefixes among requests, and would give new ones keys and values of ever older weights; "
            "start it with --disable-radix-cache, or use update_mode=retract"
        )
    return ""


async def check_head(url: str, config: ExperimentConfig, security: HttpSecurity | None) -> None:
    """Check that the adopted server at `url` computes logits in float32, if the training ranks do.

    Raises:
        EngineStartError: it does not, or it does not answer.
    """
    if not config.model.float32_head or not config.generation.engine.urls:
        return
    try:
        async with connect(url, security) as client:
            agrees = await client.computes_head_in_float32()
    except HttpError as error:
        raise EngineStartError(f"server {url} does not answer about its settings: {error}") from error
    if not agrees:
        raise EngineStartError(
            f"model.float32_head=true: server {url} computes logits in the type of its weights; start it with "
            "--enable-fp32-lm-head, or use false"
        )


async def check_pictures(url: str, config: ExperimentConfig, security: HttpSecurity | None) -> None:
    """Check that the server at `url` looks at pictures, if the run shows it pictures.

    Raises:
        EngineStartError: it does not, or it does not answer.
    """
    generation, folder = config.generation, Path(str(config.model.path))
    described = read_model_config(folder)
    if not pictures_served(config, described):
        return
    try:
        async with connect(url, security, inline_pictures=True) as client:
            fault = await fault_in_pictures(
                client,
                folder,
                vocabulary=int(described.get("text_config", described)["vocab_size"]),
                context=context_length(config, described),
                timeout_s=generation.start_timeout_s,
            )
    except (HttpError, PictureRulesError) as error:
        raise EngineStartError(f"server {url} does not answer about pictures: {error}") from error
    if fault:
        raise EngineStartError(f"generation.backend='sglang': server {url} {fault}")


async def fault_in_pictures(
    client: GenerationServerClient, folder: Path, *, vocabulary: int, context: int, timeout_s: float
) -> str:
    """Return why the server's pictures cannot be trusted; empty if they can, or if no probe fits in `context`.

    Args:
        folder: the model.

    Raises:
        HttpError: the server refused the pictures, or did not answer.
        PictureRulesError: the folder lacks files that pictures need.
    """
    noise, grey = probe_picture(), np.full((PICTURE_SIDE, PICTURE_SIDE, 3), 128, np.uint8)
    rules = PictureRules(folder)
    with closing(rules):
        token_id = await asyncio.to_thread(lambda: rules.token_id)
        rows = await asyncio.to_thread(rules.rows, noise)
    shown = with_picture(vocabulary, context, [token_id] * rows, noise)
    if shown is None:
        return ""
    ids, placed = shown
    other = PlacedPicture(placed.position, placed.length, Picture.from_array(grey))
    first, second = [
        await client.prompt_logprobs(ids, placed.end, timeout_s=timeout_s, pictures=[each]) for each in (placed, other)
    ]
    most = max(abs(one - two) for one, two in zip(first, second, strict=True))
    if most >= LEAST_DIFFERENCE:
        return ""
    return (
        f"gives {len(first)} tokens after either of two pictures the same log-probabilities (to {most:.1e} nats): it "
        "does not look at pictures; use generation.backend=embedded, or model.vision=none"
    )
