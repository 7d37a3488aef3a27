"""Registered gymnasium environments as environments of agents: `env.path=gymnasium:FrozenLake-v1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from asyncrl.api import Environment, RewardFunction, StepResult
from asyncrl.plugins.datasets.templates.picture_parts import Content
from asyncrl.plugins.envs.game_text import DRAWN, GameText, own_options


class GymnasiumEnv(Environment):
    """One game: observations are text, actions the policy's text. Its methods are plain, so they run in threads.

    An answer that is not an action ends the episode with `invalid_reward`, and `info["invalid_action"]` has the reason.

    Args:
        id: the registered name.
        reward: not called, because the game has its own reward. Rewards of episodes and groups are added to it.
        kwargs: arguments of `gymnasium.make`; with `render_mode: ansi` or `rgb_array` an observation is the game's
            drawing, text or a frame.
        observe, act, actions: see `asyncrl.plugins.envs.game_text`.
        invalid_reward: reward of an answer that is not an action.
    """

    def __init__(
        self,
        *,
        id: str,
        reward: RewardFunction | None = None,
        kwargs: Mapping[str, Any] | None = None,
        observe: str | None = None,
        act: str | None = None,
        actions: Sequence[str] = (),
        invalid_reward: float = 0.0,
    ) -> None:
        self._env: gymnasium.Env[Any, Any] = gymnasium.make(id, **(kwargs or {}))
        self._text, self._invalid_reward = GameText(observe, act, actions), invalid_reward
        self._text.check(self._env)
        self._seen: Content = ""

    def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Content, Mapping[str, Any]]:
        """Begin a game, with all `options` except `data`."""
        observation, info = self._env.reset(seed=seed, options=own_options(options))
        self._seen = self._words(observation)
        return self._seen, info

    def step(self, action: Any) -> StepResult:  # type: ignore[override]
        """Do the `action`, a text or numbers."""
        try:
            meant = self._text.action(action, self._env)
        except ValueError as error:
            return self._seen, self._invalid_reward, True, False, {"invalid_action": str(error)}
        observation, reward, terminated, truncated, info = self._env.step(meant)
        self._seen = self._words(observation)
        return self._seen, float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:  # type: ignore[override]
        """End the game."""
        self._env.close()

    def _words(self, observation: Any) -> Content:
        rendered = self._env.render() if self._env.render_mode in DRAWN else None
        return self._text.observation(observation, self._env, rendered)
