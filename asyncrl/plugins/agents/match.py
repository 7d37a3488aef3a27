"""An agent for games of several players: each seat is played by one of the run's policies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from asyncrl.api import Agent, ChatClient, Environment, Prompt, Sample, Tokenizer
from asyncrl.api.trajectory import with_turn_rewards
from asyncrl.data.picture_parts import observed
from asyncrl.plugins.agents.game import Dialogue, MessageDialogue, TokenDialogue


class MatchAgent(Agent):
    """Plays one game of an environment whose `info` names the `player` in turn, such as `PettingZooEnv`.

    Each player has its own conversation, which begins with the prompt and has only that player's observations and
    actions. Its moves are compared with those of the same player in the group's other games. A move has the rewards
    that its player gets until its next move. Metrics: `moves`, `return/<player>`, and `won/<policy>` for each other
    policy, 1 if the run's own policy got more in the game than that policy, 0.5 for a draw.

    Args:
        tokenizer: the run's tokenizer.
        players: policy of a player, by the player's name; the run's own policy plays the others.
        chat: True if the tokenizer has a chat template: observations are then the user's messages, otherwise text that
            is appended.
        max_moves: limit on the moves of all players, at least 1.
        separator: text between prompt, observation and action without a chat template.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        players: Mapping[str, str] | None = None,
        chat: bool = False,
        max_moves: int = 64,
        separator: str = "\n",
    ) -> None:
        if max_moves < 1:
            raise ValueError(f"agent max_moves is {max_moves}: give at least 1")
        self._tokenizer, self._players, self._chat = tokenizer, dict(players or {}), chat
        self._max_moves, self._separator = max_moves, separator

    async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> Sequence[Sample]:
        """Play one game. Return the conversations of the players whose policies are trained.

        Raises:
            ValueError: the game has no player of a name in `players`, or its `info` names no player.
        """
        observation, info = await env.reset(seed=prompt.data.get("seed"), options={"data": prompt.data})
        if unknown := sorted(self._players.keys() - set(info.get("players", ()))):
            raise ValueError(f"agent players: the game has no {', '.join(unknown)}; {info.get('players')} play it")
        seats: dict[str, ChatClient] = {}
        dialogues: dict[str, Dialogue] = {}
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        returns: defaultdict[str, float] = defaultdict(float)
        moves, terminated, truncated = 0, False, False
        while not (terminated or truncated) and moves < self._max_moves:
            player = info["player"]
            if player not in dialogues:
                seats[player] = self._seat(client, player)
                dialogues[player] = self._dialogue(prompt, seats[player], player)
            action, answer = await dialogues[player].answer(observed(observation))
            if not answer.token_ids:
                break  # the context is full
            observation, _, terminated, truncated, info = await env.step(action)
            moves += 1
            rewards[player].append(0.0)
            for name, reward in info["rewards"].items():
                returns[name] += reward
                if rewards[name]:  # a reward before the player's first move was not earned by it
                    rewards[name][-1] += reward
        metrics = {"moves": float(moves), **{f"return/{name}": total for name, total in returns.items()}}
        metrics |= self._won(returns)
        return [
            replace(sample, truncated=not terminated, metrics=metrics)
            for player, seat in seats.items()
            if (samples := seat.samples())
            for sample in with_turn_rewards(samples, rewards[player])
        ]

    def _seat(self, client: ChatClient, player: str) -> ChatClient:
        policy = self._players.get(player, "")
        return (client.policy(policy) if policy else client).conversation(player)

    def _dialogue(self, prompt: Prompt, seat: ChatClient, player: str) -> Dialogue:
        if self._chat:
            return MessageDialogue(prompt, seat)
        return TokenDialogue(prompt, seat, self._tokenizer, self._separator, f"{player}/")

    def _won(self, returns: Mapping[str, float]) -> Mapping[str, float]:
        """Return the results of the run's own policy against the others, by their names."""
        totals: defaultdict[str, float] = defaultdict(float)
        for player, total in returns.items():
            totals[self._players.get(player, "")] += total
        if "" not in totals:
            return {}
        own = totals.pop("")
        return {f"won/{name}": 0.5 + 0.5 * ((own > theirs) - (own < theirs)) for name, theirs in totals.items()}
