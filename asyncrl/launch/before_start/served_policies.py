"""Check of `policies` on servers that somebody else runs: they answer, and have the tokenizer of the run's model."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from asyncrl.comm.http.calls import HttpError, HttpRefused
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.inference.client import connect
from asyncrl.inference.messages import ModelInfo
from asyncrl.plugins.datasets.tokenizers import vocabulary, vocabulary_difference

_LIMIT_S = 10.0


def check_served_policies(config: ExperimentConfig) -> list[str]:
    """Ask each `url` of `policies` what it serves.

    Returns:
        Sentences for the user, about tokenizers that cannot be compared: a server reports only the folder of its
        tokenizer, which this machine may not have.

    Raises:
        ConfigError: a server does not answer, or its tokenizer is another than that of `model.path`, or cannot be
            compared although the policy is a teacher.
    """
    faults, notes, model = list[str](), list[str](), config.model.path
    teachers = {teacher.policy for teacher in config.algorithm.teachers}
    for policy in config.policies:
        if policy.url is None:
            continue
        setting = f"policies: {policy.name!r}: url={policy.url!r}"
        try:
            info = asyncio.run(_model_info(policy.url))
        except HttpError as error:
            faults.append(f"{setting}: {_what_to_do(error)}")
            continue
        folder = info.tokenizer_path or info.model_path
        unknown = ""
        if model is None or vocabulary(model) is None:
            unknown = f"model.path={model!r} has no tokenizer.json here"
        elif folder is None or vocabulary(folder) is None:
            unknown = f"the server names {folder!r}, which has no tokenizer.json here"
        if unknown and policy.name in teachers:
            faults.append(
                f"{setting}: a teacher scores the policy's tokens, so it needs the same tokenizer, and {unknown}; copy "
                "that folder to this machine, or use path"
            )
        elif unknown:
            notes.append(_not_compared(setting, unknown))
        elif model is not None and folder is not None and (difference := vocabulary_difference(model, folder)):
            faults.append(f"{setting}: {difference}")
    if faults:
        raise ConfigError("\n".join(faults))
    return notes


async def _model_info(url: str) -> ModelInfo:
    """Return the model that the server at `url` names.

    Raises:
        HttpError: it does not take requests, or does not name its model.
    """
    async with connect(url, None) as client:
        await client.ready(timeout_s=_LIMIT_S)
        return await client.model_info()


def _what_to_do(error: HttpError) -> str:
    if isinstance(error, HttpRefused) and error.status == HTTPStatus.UNAUTHORIZED:
        return "the server asks for a token, and it gets none of the run; start it without --api-key"
    return f"no generation server answers there ({error}); start it first, or use path and the run starts one"


def _not_compared(setting: str, why: str) -> str:
    return (
        f"{setting}: its tokenizer was not compared with that of the run's model, as {why}. With another tokenizer it "
        "would read other text than the agent sent, so make sure that they are the same"
    )
