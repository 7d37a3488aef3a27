"""Games of several players, by PettingZoo's AEC API, as environments of agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium import Space

from asyncrl.api import Environment, RewardFunction, StepResult
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.data.picture_parts import Content
from asyncrl.plugins.envs.gymnasium_env import GameText, own_options


@dataclass(frozen=True, slots=True)
class _Seat:
    """Spaces of one player."""

    observation_space: Space[Any]
    action_space: Space[Any]
    render_mode: None = None


class PettingZooEnv(Environment):
    """One game. Observations and actions are those of the player whose turn it is, `info["player"]`.

    `info["players"]` of `reset` has all players. `info["rewards"]` of `step` has the reward of each player for this
    step; the step's own reward is that of the player that moved. An answer that is not an action ends the game with
    `invalid_reward` for that player, and `info["invalid_action"]` has the reason. `MatchAgent` plays such games.

    Args:
        game: import path of the function that makes the game, such as `pettingzoo.classic.tictactoe_v3:env`.
        reward: not called, because the game has its own rewards.
        kwargs: arguments of that function.
        observe, act, actions: see `asyncrl.plugins.envs.gymnasium_env.GameText`.
        invalid_reward: reward of an answer that is not an action.

    Raises:
        ValueError: a space of a player cannot be converted to text.
    """

    def __init__(
        self,
        *,
        game: str,
        reward: RewardFunction | None = None,
        kwargs: Mapping[str, Any] | None = None,
        observe: str | None = None,
        act: str | None = None,
        actions: Sequence[str] = (),
        invalid_reward: float = 0.0,
    ) -> None:
        make: Callable[..., Any] = load_plugin(game)
        self._env, self._invalid_reward = make(**(kwargs or {})), invalid_reward
        self._text = GameText(observe, act, actions)
        self._seats = {
            player: _Seat(self._env.observation_space(player), self._env.action_space(player))
            for player in self._env.possible_agents
        }
        for seat in self._seats.values():
            self._text.check(seat)

    def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Content, Mapping[str, Any]]:
        """Begin a game, with all `options` except `data`."""
        self._env.reset(seed=seed, options=own_options(options))
        return self._seen(), {"player": self._env.agent_selection, "players": list(self._seats)}

    def step(self, action: Any) -> StepResult:  # type: ignore[override]
        """Do the `action` of the player whose turn it is."""
        player = self._env.agent_selection
        try:
            meant = self._text.action(action, self._seats[player])
        except ValueError as error:
            lost = {"rewards": {player: self._invalid_reward}, "invalid_action": str(error)}
            return "", self._invalid_reward, True, False, lost
        self._env.step(meant)
        rewards = {name: float(reward) for name, reward in self._env.rewards.items()}
        is_cut_off = any(self._env.truncations.values())
        while self._env.agents and self._is_out(self._env.agent_selection):
            self._env.step(None)  # required by PettingZoo for a player that is out of the game
        is_over = not self._env.agents
        info = {"rewards": rewards} | ({} if is_over else {"player": self._env.agent_selection})
        seen = "" if is_over else self._seen()
        return seen, rewards.get(player, 0.0), is_over and not is_cut_off, is_over and is_cut_off, info

    def close(self) -> None:  # type: ignore[override]
        """End the game."""
        self._env.close()

    def _is_out(self, player: str) -> bool:
        return bool(self._env.terminations[player] or self._env.truncations[player])

    def _seen(self) -> Content:
        player = self._env.agent_selection
        return self._text.observation(self._env.observe(player), self._seats[player])
