"""A game as an OpenEnv server, for `verifiers_openenv.yaml`; nothing in it knows asyncrl.

    .venv-verifiers-v1/bin/python verifiers_openenv_server.py PORT

The player is asked for a word about a subject. It has two tries, and a hint in between.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

RHYMES = {"cat": "hat", "sun": "run", "tree": "bee", "moon": "spoon", "light": "night", "star": "car"}


class Answer(Action):
    text: Any
    """Any, because an answer that is a number or a list in JSON is an answer too."""


class Seen(Observation):
    question: str


class Rhyme(Environment[Answer, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._word, self._tries = "", 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        self._word, self._tries = random.Random(seed).choice(sorted(RHYMES)), 2
        return Seen(question=f'Say one short word that rhymes with "{self._word}".')

    def step(self, action: Answer, timeout_s: float | None = None, **_: Any) -> Seen:
        self._tries -= 1
        text, rhyme = str(action.text).lower(), RHYMES[self._word]
        if rhyme in text:
            return Seen(question="Right.", done=True, reward=1.0)
        if not self._tries:
            return Seen(question="Wrong.", done=True, reward=sum(letter in rhyme for letter in text) / (4 * len(text)))
        return Seen(question=f"No. It begins with {rhyme[0]}.", reward=0.0)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Rhyme, Answer, Seen, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
