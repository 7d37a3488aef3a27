"""A check that a server looks at the pictures that it is shown, before it gets requests.

Two prompts of the same token ids with different pictures have to get different log-probabilities. Whether they are the
trainer's is checked at each weight update (`asyncrl.manager.fleet.logprob_check`).
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import numpy as np

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.inference.client import GenerationServerClient
from asyncrl.models.pictures.picture_rules import PictureRules
from asyncrl.models.weights.versions.logprob_probe import PICTURE_SIDE, probe_picture, with_picture

LEAST_DIFFERENCE = 1e-6
"""In nats: log-probabilities of two pictures that differ by less are taken for equal."""


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
