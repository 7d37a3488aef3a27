"""Kuhn poker for `kuhn_poker.yaml`: the game, an agent that plays it against itself or an older self, and its NashConv.

Two players get one of three cards, 1 to 3, and pay one chip each. In turn they say 0 (pass: check or fold) or 1 (bet:
bet or call), until both passed, one folded or one called; the higher card takes the pot. A player sees its card and
what was said, for example `301=`: card 3, the first player passed, the second bet. Whoever says anything else pays two
chips.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncrl.api import ChatClient, Environment, GenerationRequest, Prompt, Sample, Tokenizer

PASS, BET = "0", "1"
CARDS = (1, 2, 3)
DEALS: Sequence[tuple[int, int]] = tuple(itertools.permutations(CARDS, 2))
HISTORIES: tuple[tuple[str, str], tuple[str, str]] = (("", PASS + BET), (PASS, BET))
"""What was said before a move, by player: before its first move, and before the other move that it may have."""
SEATS = ("first", "second")
FORFEIT = 2


def payoff(cards: tuple[int, int], history: str) -> int | None:
    """Return the chips that the first player wins; None while the game goes on."""
    shown = 1 if cards[0] > cards[1] else -1
    ends = {"00": shown, "10": 1, "010": -1, "11": 2 * shown, "011": 2 * shown}
    return ends.get(history)


def state(card: int, history: str) -> str:
    """Return the information state of the player whose turn it is, as it reads it."""
    return f"{card}{history}="


STATES: Sequence[str] = tuple(state(card, history) for history in ("", PASS, BET, PASS + BET) for card in CARDS)


def value(bets: Mapping[str, float], cards: tuple[int, int], history: str = "") -> float:
    """Return the chips that the first player wins on average if both bet with the probabilities `bets`, by state."""
    won = payoff(cards, history)
    if won is not None:
        return won
    bet = bets[state(cards[len(history) % 2], history)]
    return (1 - bet) * value(bets, cards, history + PASS) + bet * value(bets, cards, history + BET)


def nash_conv(bets: Mapping[str, float]) -> float:
    """Return by how many chips a game the two players could do better in all, each alone, if the other plays `bets`.

    0 in an equilibrium, 11/12 for random play.
    """
    return sum(
        max(
            sum(sign * value({**bets, **_pure(card, seat, moves)}, cards) for cards in DEALS if cards[seat] == card)
            for moves in itertools.product((0.0, 1.0), repeat=2)
        )
        / len(DEALS)
        for seat, sign in ((0, 1), (1, -1))
        for card in CARDS
    )


def _pure(card: int, seat: int, moves: tuple[float, ...]) -> dict[str, float]:
    return {state(card, history): move for history, move in zip(HISTORIES[seat], moves, strict=True)}


class Deals:
    """Every deal, from either player's side, again and again.

    Args:
        split: the same for all.
        seed: without effect.
    """

    def __init__(self, *, split: str, seed: int, num_rows: int = 4096) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> Mapping[str, Any]:
        """The `cards`, and the `seat` of the policy where an older one has the other."""
        seat, deal = divmod(index % (2 * len(DEALS)), len(DEALS))
        return {"prompt": state(DEALS[deal][seat], ""), "cards": list(DEALS[deal]), "seat": seat}


class RandomPlay:
    """Demonstrations for the base model: in each state either move, as likely."""

    def __init__(self, *, split: str, seed: int, num_rows: int = 4096) -> None:
        self._seed, self._num_rows = f"{seed}/{split}", num_rows

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> Mapping[str, Any]:
        """A state and a move."""
        draw = random.Random(f"{self._seed}/{index}")
        return {"prompt": STATES[index % len(STATES)], "answer": draw.choice((PASS, BET))}

    def demonstration(self, row: Mapping[str, Any]) -> str:
        """The move."""
        return str(row["answer"])


async def play(
    prompt: Prompt, env: Environment, client: ChatClient, *, tokenizer: Tokenizer, opponent: str = ""
) -> list[Sample]:
    """One game. Each move is a sample, compared with the moves of the group's other games in the same state.

    Args:
        opponent: the one of `policies` that has the other seat; empty: the policy has both.
    """
    cards, own = tuple(prompt.data["cards"]), prompt.data["seat"]
    history, moves, won = "", [], None
    while won is None:
        turn = len(history) % 2
        seen = state(cards[turn], history)
        plays = not opponent or turn == own
        asked = client.conversation(f"{SEATS[turn]}/{seen}") if plays else client.policy(opponent)
        history += await _move(asked, prompt, seen, tokenizer)
        if plays:
            moves.append((turn, asked))
        won = (-FORFEIT if turn == 0 else FORFEIT) if history[-1] not in (PASS, BET) else payoff(cards, history)
    results = {turn: float(won if turn == 0 else -won) for turn in (0, 1)}
    metrics = {f"won/{opponent}": float(results[own] > 0)} if opponent else {}  # for versions.pick=prioritised
    return [replace(sample, metrics=metrics) for turn, asked in moves for sample in asked.samples(results[turn])]


async def exploitability(
    prompt: Prompt, env: Environment, client: ChatClient, *, tokenizer: Tokenizer
) -> Sequence[Sample]:
    """For evaluations: the NashConv of the policy, from its probability of a bet in each of the twelve states.

    A move that is drawn comes with its log-probability, and the policy has two moves.
    """
    bets: dict[str, float] = {}
    for seen in STATES:
        asked = client.conversation(seen)
        move = await _move(asked, prompt, seen, tokenizer)
        chance = math.exp(float(asked.samples()[0].behave_logprobs[-1]))
        bets[seen] = chance if move == BET else 1 - chance
    measured = nash_conv(bets)
    first = client.conversation(STATES[0]).samples(-measured)[0]
    return [
        Sample(
            first.tokens,
            first.loss_mask,
            first.behave_logprobs,
            first.versions,
            first.reward,
            metrics={"nash_conv": measured} | {f"bet_{seen}": bet for seen, bet in bets.items()},
        )
    ]


async def _move(client: ChatClient, prompt: Prompt, seen: str, tokenizer: Tokenizer) -> str:
    """Return what the player says that `client` asks; `?` for the end of the text."""
    name = f"{prompt.prompt_id}/{prompt.member}/{seen}"
    result = await client.generate(GenerationRequest(name, tuple(tokenizer.encode(seen)), 1, prompt.sampling))
    return tokenizer.decode(result.completions[0].token_ids) or "?"
