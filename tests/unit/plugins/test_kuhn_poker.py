"""The game of `kuhn_poker` is the one of OpenSpiel, and so is its NashConv."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

RECIPES = Path(__file__).parents[3] / "experiments" / "recipes"


@pytest.fixture(scope="module")
def kuhn() -> Any:
    sys.path.insert(0, str(RECIPES))
    try:
        import kuhn_poker
    finally:
        sys.path.remove(str(RECIPES))
    return kuhn_poker


def test_every_game_pays_what_open_spiel_pays(kuhn: Any) -> None:
    pyspiel = pytest.importorskip("pyspiel", reason="open_spiel is not installed")
    game = pyspiel.load_game("kuhn_poker")
    played = 0
    for cards in kuhn.DEALS:
        for moves in itertools.product("01", repeat=3):
            spiel, history = game.new_initial_state(), ""
            for card in cards:
                spiel.apply_action(card - 1)
            for move in moves:
                if kuhn.payoff(cards, history) is None:
                    assert spiel.information_state_string() == spiel_state(kuhn.state(cards[len(history) % 2], history))
                    spiel.apply_action(int(move))
                    history += move
            assert spiel.is_terminal()
            assert spiel.returns()[0] == kuhn.payoff(cards, history)
            played += 1
    assert played == 48


def spiel_state(seen: str) -> str:
    """OpenSpiel's name of an information state."""
    return f"{int(seen[0]) - 1}{seen[1:-1].replace('0', 'p').replace('1', 'b')}"


@given(st.lists(st.floats(0, 1), min_size=12, max_size=12))
def test_nash_conv_is_open_spiels(kuhn: Any, chances: list[float]) -> None:
    pyspiel = pytest.importorskip("pyspiel", reason="open_spiel is not installed")
    bets = dict(zip(kuhn.STATES, chances, strict=True))
    table = {spiel_state(seen): [(0, 1 - bet), (1, bet)] for seen, bet in bets.items()}
    assert kuhn.nash_conv(bets) == pytest.approx(
        pyspiel.nash_conv(pyspiel.load_game("kuhn_poker"), pyspiel.TabularPolicy(table)), abs=1e-9
    )


@pytest.mark.parametrize("bluff", [0.0, 0.2, 1 / 3])
def test_kuhns_equilibria_leave_nothing_to_gain(kuhn: Any, bluff: float) -> None:
    bets = dict.fromkeys(kuhn.STATES, 0.0)
    bets |= {"1=": bluff, "3=": 3 * bluff, "201=": bluff + 1 / 3, "301=": 1.0}
    bets |= {"10=": 1 / 3, "30=": 1.0, "21=": 1 / 3, "31=": 1.0}
    assert kuhn.nash_conv(bets) == pytest.approx(0, abs=1e-12)
    assert kuhn.nash_conv(dict.fromkeys(kuhn.STATES, 0.5)) == pytest.approx(11 / 12)
