"""Registered gymnasium environments as environments of agents, `env.path=gymnasium:FrozenLake-v1`: observations become
text for the policy, and its answers actions.

There are defaults for common spaces. For other spaces, or for your own wording, name functions: `observe(observation,
env)` and `act(text, env) -> action`, which raises ValueError if the text is not an action. `observe` returns text or,
for a model that takes pictures, a frame (uint8 [height, width, 3]) or a list of parts. With `render_mode="rgb_array"`
an observation is the frame that the game draws, with `ansi` its drawing in text. An agent may also answer with numbers
(`asyncrl.plugins.agents.vla`); `act` then receives the list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium import Space, spaces

from asyncrl.api import Environment, RewardFunction, StepResult
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.data.picture_parts import Content, observed


class GymnasiumEnv(Environment):
    """One game: observations are text, actions the policy's text. Its methods are plain, so they run in threads.

    An answer that is not an action ends the episode with `invalid_reward`, and `info["invalid_action"]` has the reason.

    Args:
        id: the registered name.
        reward: not called, because the game has its own reward. Rewards of episodes and groups are added to it.
        kwargs: arguments of `gymnasium.make`; with `render_mode: ansi` or `rgb_array` an observation is the game's
            drawing, text or a frame.
        observe, act, actions: see `GameText`.
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


DRAWN = ("ansi", "rgb_array")
"""Render modes in which an observation is what the game draws."""
_NUMBER = re.compile(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?")
_COLOURED = re.compile("\x1b\\[[0-9;]*m(.*?)\x1b\\[0m")
_SHOWN = (spaces.Discrete, spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete, spaces.Text)


class Game(Protocol):
    """The parts of a game that its text depends on."""

    @property
    def observation_space(self) -> Space[Any]:
        """Space of observations."""
        ...

    @property
    def action_space(self) -> Space[Any]:
        """Space of actions."""
        ...

    @property
    def render_mode(self) -> str | None:
        """`ansi` if the game draws itself in text, `rgb_array` if it draws frames."""
        ...


class GameText:
    """Conversion of one game to text and back.

    Args:
        observe, act: import paths of the user's functions.
        actions: names of the actions 0, 1, ... of a `Discrete` space; without names an action is its number.
    """

    def __init__(self, observe: str | None, act: str | None, actions: Sequence[str]) -> None:
        self._observe: Callable[..., Any] | None = None if observe is None else load_plugin(observe)
        self._act: Callable[..., Any] | None = None if act is None else load_plugin(act)
        self._actions = tuple(actions)

    def check(self, env: Game) -> None:
        """Check that the spaces of `env` can be converted.

        Raises:
            ValueError: one cannot; the message names the setting to use.
        """
        seen, done = env.observation_space, env.action_space
        if self._observe is None and env.render_mode not in DRAWN and not _has_text(seen):
            raise ValueError(f"observations are {seen}: name a function observe(observation, env) as env.args.observe")
        if self._act is None and not isinstance(done, _SHOWN):
            raise ValueError(f"actions are {done}: name a function act(text, env) as env.args.act")
        if self._actions and (not isinstance(done, spaces.Discrete) or len(self._actions) != done.n):
            raise ValueError(f"env.args.actions names {len(self._actions)} actions, and the game's are {done}")

    def observation(self, observation: Any, env: Game, rendered: Any = None) -> Content:
        """Return the observation for the policy, text, or text and pictures; `rendered` is what the game draws, a frame
        or text, if it does.
        """
        if self._observe is not None:
            return observed(self._observe(observation, env))
        if rendered is not None and env.render_mode == "rgb_array":
            return observed(rendered)
        if rendered is not None:
            return _COLOURED.sub(r"[\1]", str(rendered)).strip("\n")
        return text_of(env.observation_space, observation)

    def action(self, answer: Any, env: Game) -> Any:
        """Convert `answer`, a text or numbers, to an action.

        Raises:
            ValueError: it is not an action.
        """
        if self._act is not None:
            return self._act(answer, env)
        if isinstance(answer, Sequence) and not isinstance(answer, str):
            answer = " ".join(f"{number:.9g}" for number in answer)
        text = str(answer)
        if self._actions:
            found = {name: re.search(rf"\b{re.escape(name)}\b", text, re.IGNORECASE) for name in self._actions}
            answer = {name: match.start() for name, match in found.items() if match}
            if not answer:
                raise ValueError(f"none of {', '.join(self._actions)} is in {text!r:.80}")
            return int(env.action_space.start) + self._actions.index(min(answer, key=lambda name: answer[name]))  # type: ignore[attr-defined]
        return action_of(env.action_space, text)


def own_options(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the options of `reset` that are the game's own: all but the prompt's `data`; None without any."""
    return {name: value for name, value in (options or {}).items() if name != "data"} or None


def _has_text(space: Space[Any]) -> bool:
    if isinstance(space, spaces.Tuple):
        return all(_has_text(each) for each in space.spaces)
    if isinstance(space, spaces.Dict):
        return all(_has_text(each) for each in space.spaces.values())
    return isinstance(space, _SHOWN)


def text_of(space: Space[Any], observation: Any) -> str:
    """Return an observation in words: numbers of an array by rows, parts of a tuple or mapping one by one."""
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{name}: {text_of(each, observation[name])}" for name, each in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return ", ".join(text_of(each, part) for each, part in zip(space.spaces, observation, strict=True))
    if isinstance(space, spaces.Text):
        return str(observation)
    rows = np.atleast_2d(np.asarray(observation))
    return "\n".join(" ".join(f"{number:.4g}" for number in row.ravel().tolist()) for row in rows)


def action_of(space: Space[Any], text: str) -> Any:
    """Read the first action in `text`: a number, as many numbers as the space has, or the text itself.

    Raises:
        ValueError: there is no action of the space in it.
    """
    if isinstance(space, spaces.Text):
        action: Any = text.strip()
    elif isinstance(space, spaces.Discrete):
        match = re.search(r"-?\d+", text)
        action = None if match is None else int(match.group())
    else:
        numbers = [float(number) for number in _NUMBER.findall(text)]
        shape, dtype = space.shape, space.dtype
        assert shape is not None, "spaces of arrays have a shape"
        count = int(np.prod(shape))
        action = np.array(numbers[:count]).astype(dtype).reshape(shape) if len(numbers) >= count else None
    if action is None or not space.contains(action):
        raise ValueError(f"{text!r:.80} is no action of {space}")
    return action
