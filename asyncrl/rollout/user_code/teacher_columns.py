"""Columns of samples for `algorithm.teachers`: the source of their row, and the log-probabilities of servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.api import GenerationClient, GenerationRequest, Sample, SamplingParams
from asyncrl.api.columns import ColumnError
from asyncrl.rollout.user_code.rewards import SOURCE
from asyncrl.trainer.settings import SOURCE_NUMBER, AlgorithmConfig, TeacherConfig


def with_source_number(data: Mapping[str, Any], algorithm: AlgorithmConfig) -> Mapping[str, Any]:
    """Return the row with the number of its source, if teachers are named for sources.

    Raises:
        ColumnError: the row has no source, or its source has no teacher although the run learns from teachers only.
    """
    sources = algorithm.taught_sources
    if not sources:
        return data
    source = data.get(SOURCE)
    if not isinstance(source, str):
        raise ColumnError(
            f"algorithm.teachers are for rows of {SOURCE} {', '.join(map(repr, sources))}, and this row has "
            f"{SOURCE} {source!r}; give rows that field, or leave the teachers' sources empty, which is for all"
        )
    alone = algorithm.advantage.name == "zero" and all(teacher.sources for teacher in algorithm.teachers)
    if alone and source not in sources:
        raise ColumnError(
            f"algorithm.teachers has none for rows of {SOURCE} {source!r}, and algorithm.advantage=zero learns from "
            "teachers alone; name it in the sources of one"
        )
    return {**data, SOURCE_NUMBER.partition("/")[2]: sources.index(source) if source in sources else -1}


async def scored_by_teachers(
    samples: Sequence[Sample], data: Mapping[str, Any], algorithm: AlgorithmConfig, policy: GenerationClient
) -> Sequence[Sample]:
    """Return the samples, each with a column of log-probabilities for every teacher that runs on servers.

    The column is 0 if the teacher is not for the row's source.

    Raises:
        Exception: a server cannot score.
    """
    for teacher in algorithm.teachers:
        if teacher.policy is not None:
            wanted = not teacher.sources or data.get(SOURCE) in teacher.sources
            samples = await asyncio.gather(*(_scored(sample, teacher, policy, wanted=wanted) for sample in samples))
    return samples


async def _scored(sample: Sample, teacher: TeacherConfig, policy: GenerationClient, *, wanted: bool) -> Sample:
    column_T = np.zeros(len(sample.tokens), np.float32)
    if wanted and sample.loss_mask.any():
        first = int(sample.loss_mask.argmax())
        request = GenerationRequest(
            teacher.role,
            tuple(sample.tokens.tolist()),
            1,
            SamplingParams(),
            sample.pictures,
            policy=teacher.policy or "",
            score_from=first,
        )
        column_T[first:] = (await policy.generate(request)).scores
        column_T *= sample.loss_mask
    name = teacher.logprobs.partition("/")[2]
    return replace(sample, token_columns={**sample.token_columns, name: column_T})
