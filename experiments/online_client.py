"""Uses the policy of a run that it is no part of, and says how good each answer was; the run learns from it.

    python -m asyncrl.launch online &
    python experiments/online_client.py ~/.cache/asyncrl/online/trial0

It needs nothing of asyncrl, and nothing but Python. Copy this file: `Run` has the calls, `solve` is the use.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import urllib.error
import urllib.request
from collections import deque
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

AGAIN_S = 0.5
"""After which a door that is gone, or has no room, is asked again."""


class RunOver(Exception):
    """No door has answered for a while."""


class Session:
    """One episode: the policy at `base_url` (and `root_url`, for Anthropic's clients), to be rewarded once."""

    def __init__(self, base_url: str, api_key: str, **_: Any) -> None:
        self.base_url, self.api_key = base_url, api_key

    def ask(self, text: str) -> str:
        """Return the policy's answer; any OpenAI client would do."""
        body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
        reply = call(f"{self.base_url}/chat/completions", self.api_key, body)
        return str(reply["choices"][0]["message"]["content"] or "")

    def reward(self, reward: float, **metrics: float) -> None:
        """Report how good the session was; it ends. A repeated report does no harm."""
        call(f"{self.base_url}/reward", self.api_key, {"reward": reward, "metrics": metrics})

    def reject(self) -> None:
        """End the session without a reward; it is not trained."""
        call(self.base_url, self.api_key, method="DELETE")


class Run:
    """A run whose sessions others open, by its folder."""

    def __init__(self, folder: Path, patience_s: float = 60.0) -> None:
        self.folder, self.patience_s = folder / "online", patience_s

    def open(self) -> list[Session]:
        """Open the sessions of one group, for episodes that are compared; wait for room, and for a door that restarts.

        Raises:
            RunOver: no door has answered for `patience_s`.
        """
        heard = time.monotonic()
        while time.monotonic() - heard < self.patience_s:
            doors = sorted(self.folder.glob("door-*.json"))
            try:
                url = json.loads(random.choice(doors).read_text())["url"]
                opened = call(f"{url}/v1/sessions", (self.folder / "key").read_text())
                return [Session(**each) for each in opened["sessions"]]
            except urllib.error.HTTPError as error:
                if error.code != 429:
                    raise
                heard = time.monotonic()  # it lives, and has no room now
            except (OSError, IndexError):
                pass
            time.sleep(AGAIN_S)
        raise RunOver(f"no door in {self.folder} has answered for {self.patience_s:g} s")


def call(url: str, key: str, body: dict[str, Any] | None = None, method: str = "POST") -> dict[str, Any]:
    """Make a call; return the answer."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers, method=method)
    with urllib.request.urlopen(request) as answer:
        return dict(json.load(answer))


def solve(run: Run) -> list[float]:
    """Have the policy add some numbers, in each session of a group; return the rewards."""
    numbers = [random.randint(1, 9 if random.random() < 0.5 else 99) for _ in range(random.randint(2, 8))]

    def play(session: Session) -> float | None:
        try:
            answer = session.ask("+".join(map(str, numbers)) + "=")
            right = float(answer.partition("#")[2] == str(sum(numbers)))
            session.reward(right, numbers=len(numbers))
        except OSError:  # the session's worker is gone, or the session is over: the run counts it as lost
            return None
        return right

    sessions = run.open()
    with ThreadPoolExecutor(len(sessions)) as members:
        return [reward for reward in members.map(play, sessions) if reward is not None]


def main() -> None:
    """Use the policy until the run is over, and print how often it is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--at-once", type=int, default=32, help="groups that are played at the same time")
    parser.add_argument("--groups", type=int, default=0, help="groups in all; 0: until the run is over")
    args = parser.parse_args()
    run, played = Run(args.run.expanduser()), 0
    shown: deque[float] = deque(maxlen=1000)
    with ThreadPoolExecutor(args.at_once) as users:
        playing = {users.submit(solve, run) for _ in range(min(args.at_once, args.groups or args.at_once))}
        while playing:
            done, playing = wait(playing, return_when=FIRST_COMPLETED)
            for each in done:
                try:
                    shown += each.result()
                except RunOver as over:
                    print(over)
                    return
                played += 1
                if played + len(playing) < (args.groups or played + args.at_once):
                    playing.add(users.submit(solve, run))
                if played % args.at_once == 0 and shown:
                    right = sum(shown) / len(shown)
                    print(f"{played} groups played; of the last {len(shown)} answers {right:.0%} are right", flush=True)


if __name__ == "__main__":
    main()
