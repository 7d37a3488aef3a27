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
from asyncrl.comm.security import HttpSecurity
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
    try:
        async with connect(url, security, inline_pictures=True) as client:
            setting, fault = await _fault(client, config)
    except (HttpError, PictureRulesError) as error:
        raise EngineStartError(f"server {url} does not answer what it is asked before it serves: {error}") from error
    if fault:
        raise EngineStartError(f"{setting}: server {url} {fault}")


async def _fault(client: GenerationServerClient, config: ExperimentConfig) -> tuple[str, str]:
    """Return a setting that the server does not go with, and why; two empty texts if there is none."""
    mode, generation = config.manager.update_mode, config.generation
    if fault := await _fault_in_keeping(client, mode, generation.start_timeout_s):
        return f"manager.update_mode={str(mode)!r}", fault
    if config.model.float32_head and generation.engine.urls and not await client.computes_head_in_float32():
        fault = "computes logits in the type of its weights; start it with --enable-fp32-lm-head, or use false"
        return "model.float32_head=true", fault
    folder = Path(str(config.model.path))
    described = read_model_config(folder)
    if not pictures_served(config, described):
        return "", ""
    fault = await fault_in_pictures(
        client,
        folder,
        vocabulary=int(described.get("text_config", described)["vocab_size"]),
        context=context_length(config, described),
        timeout_s=generation.start_timeout_s,
    )
    return "generation.backend='sglang'", fault


async def _fault_in_keeping(client: GenerationServerClient, mode: UpdateMode, timeout_s: float) -> str:
    """Return why answers of this server may not span a weight update of this mode; empty if they may, or never do."""
    if mode not in (UpdateMode.retract, UpdateMode.in_place):
        return ""
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
