"""Check after each weight update that the server scores fixed prompts as the trainer did when it published.

A difference above rounding means another model than the trainer's: weights of another version, tensors that were not
replaced, or stale entries in a cache. The server is then quarantined and updated again, with its caches flushed, until
it agrees. If no server ever does (`FleetDecisions.never_agree`) the run ends. The check cannot detect a change smaller
than the rounding of the server's data type.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from asyncrl.api.picture import PictureError
from asyncrl.comm.http.calls import HttpError
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.client import GenerationServerClient
from asyncrl.manager.fleet.servers import Target
from asyncrl.models.weights.versions.logprob_probe import read_probe
from asyncrl.models.weights.versions.manifest import ManifestError

FLOAT32_TOLERANCE = 1e-3
"""In nats. Two float32 implementations differ by about 1e-5 for log-probabilities around -10."""
COARSE_TOLERANCE = 0.5
"""In nats. bfloat16 has 8 bits of mantissa: logits between 16 and 32 are rounded to multiples of 0.125. With trained
weights (SmolLM2-135M) two right implementations differ by 0.09 in the mean, and by 0.45 at one of a hundred tokens.
"""
QUANTISED_TOLERANCE = 1.0
"""In nats, for servers that quantise weights: fp8 has 3 bits of mantissa."""


class WeightsDiffer(HttpError):
    """The server's scores of the probe differ from the trainer's."""


def logprob_check_tolerance(config: ExperimentConfig) -> float:
    """`manager.logprob_check_tolerance` in nats, or a default for the data types if it is null."""
    if config.manager.logprob_check_tolerance is not None:
        return config.manager.logprob_check_tolerance
    if config.generation.engine.quantised:
        return QUANTISED_TOLERANCE
    model = config.model
    published = model.dtype if model.publish_dtype == Dtype.auto else model.publish_dtype
    exact = model.dtype == published == config.generation.dtype == Dtype.float32
    return FLOAT32_TOLERANCE if exact else COARSE_TOLERANCE


class LogprobCheck:
    """An `UpdateCheck`: raises `WeightsDiffer` if the log-probabilities of a sequence differ by more than the tolerance
    in the mean. A single token may differ by more: rounding in 16 bits has no small bound.

    Weights without a probe pass: they do not come from asyncrl's trainer.

    Args:
        tolerance: in nats, above 0.

    Attributes:
        differences: the largest mean difference of a sequence at each server's last check, in nats.
        alarms: number of checks that found a larger difference than allowed.
    """

    def __init__(self, tolerance: float, log: logging.Logger) -> None:
        self.tolerance = tolerance
        self.differences: dict[int, float] = {}
        self.alarms = 0
        self._log = log

    async def __call__(self, server: int, client: GenerationServerClient, target: Target) -> None:
        """Check the server with this index, which should serve `target`. The caller limits the time.

        Raises:
            WeightsDiffer: the server has other weights.
            HttpError: the server did not answer.
        """
        try:
            probe = await asyncio.to_thread(read_probe, Path(target.path))
        except (ManifestError, OSError) as error:
            raise HttpError(f"the probe of v{target.version} cannot be read: {error}") from error
        if probe is None:
            return
        try:
            pictures = [() if each.picture is None else (each.picture.placed,) for each in probe.sequences]
        except PictureError as error:
            raise HttpError(f"the probe of v{target.version} has a damaged picture: {error}") from error
        served = await asyncio.gather(
            *(
                client.prompt_logprobs(each.token_ids, each.start, timeout_s=math.inf, pictures=shown)
                for each, shown in zip(probe.sequences, pictures, strict=True)
            )
        )
        scores = [
            [(place, each.logprobs[place], value) for place, value in enumerate(values, each.start + 1)]
            for each, values in zip(probe.sequences, served, strict=True)
        ]
        self._compare(server, target.version, scores)

    def _compare(self, server: int, version: int, scores: Sequence[Sequence[tuple[int, float, float]]]) -> None:
        """Compare the `scores`: by sequence, the place of each token, with the trainer's and the server's score."""
        means = {
            sequence: fmean(abs(trained - served) for _, trained, served in tokens)
            for sequence, tokens in enumerate(scores)
            if tokens
        }
        sequence, difference = max(means.items(), key=lambda mean: (math.isnan(mean[1]), mean[1]))
        place, trained, served = max(scores[sequence], key=lambda token: abs(token[1] - token[2]))
        self.differences[server] = difference
        if difference <= self.tolerance:
            self._log.info("generation server %d agrees with the trainer on v%d to %.1e", server, version, difference)
            return
        self.alarms += 1
        message = (
            f"generation server {server} does not serve the trainer's v{version}: it gives token {place} of "
            f"the probe's sequence {sequence} the log-probability {served:.6g}, the trainer "
            f"{trained:.6g}; the difference {difference:.3g} is above "
            f"manager.logprob_check_tolerance={self.tolerance:g}"
        )
        self._log.error("%s; the server is updated again. Raise the tolerance if this is rounding", message)
        raise WeightsDiffer(message)
