"""What a GenerationServer process needs of its engine, whichever it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from asyncrl.config.experiment import ExperimentConfig

BASE_VERSION: Final = "0"
"""Label of the weights that an engine starts with: policy version 0 is the initial model."""


class EngineStartError(RuntimeError):
    """An engine did not become ready."""


@dataclass(frozen=True, slots=True)
class Served:
    """An engine that takes requests. `pid` is None where its process is not ours."""

    url: str
    pid: int | None


class EngineHost(Protocol):
    """An engine behind SGLang's HTTP API, with the verbs of its life."""

    async def start(self) -> Served:
        """Bring it up with the initial model under label `BASE_VERSION`; may be called again after `failed`.

        Raises:
            EngineStartError: it did not come up; the message holds the reason.
        """

    async def failed(self) -> str:
        """Wait until it is gone; returns the reason."""

    async def stop(self) -> None:
        """Let go of it; what was started here ends here. Idempotent."""


def context_length(config: ExperimentConfig, model_config: Mapping[str, Any]) -> int:
    """Longest prompt + answer that an engine takes: as set or needed, but no more than the model has positions for.

    `model_config` is the content of the model's `config.json`.
    """
    wanted = config.generation.context_length or (
        config.dataset.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    )
    text_config = model_config.get("text_config", model_config)
    return min(wanted, int(text_config.get("max_position_embeddings", wanted)))


class RestartBudget:
    """How often an engine that dies is started again: at most `limit` times within any `window_s` seconds.

    One that dies of something passing is worth restarting: its clients carry on elsewhere and it rejoins at the newest
    version. One that dies again and again has a cause that a person must see. Pure: the caller brings the clock.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit, self._window_s = limit, window_s
        self._times: deque[float] = deque()

    def spend(self, now_s: float) -> bool:
        """True if a restart at `now_s` is within the budget, which it then uses up."""
        while self._times and now_s - self._times[0] >= self._window_s:
            self._times.popleft()
        if len(self._times) >= self._limit:
            return False
        self._times.append(now_s)
        return True
