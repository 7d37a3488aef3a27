"""An example of several turns: a wrong answer earns feedback and another try."""

from __future__ import annotations

from typing import Any

from asyncrl.api import RewardFunction, StepResult
from asyncrl.plugins.envs.single_turn import SingleTurnEnv, text_of_prompt


class RetryEnv(SingleTurnEnv):
    """Like `SingleTurnEnv`, but after an answer below `solved_at` the episode continues with `feedback` as observation.

    It has no state per try, so a whole group can share one instance; the agent limits the number of turns.

    Args:
        reward: the function of the setting `reward.path`.
        feedback: what the model reads after a wrong answer; `{prompt}` is the question.
        solved_at: the reward that ends an episode.
    """

    def __init__(
        self,
        *,
        reward: RewardFunction,
        feedback: str = "\nThat is not right. Try again.\n{prompt}\n",
        solved_at: float = 1.0,
    ) -> None:
        super().__init__(reward=reward)
        self._feedback, self._solved_at = feedback, solved_at

    async def step(self, action: Any) -> StepResult:
        """Score answer text `action`: (feedback, reward, solved, False, {})."""
        _, reward, _, _, info = await super().step(action)
        assert self._data is not None
        solved = reward >= self._solved_at
        return (
            "" if solved else self._feedback.replace("{prompt}", text_of_prompt(self._data["prompt"])),
            reward,
            solved,
            False,
            info,
        )
