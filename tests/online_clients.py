"""Programs that use a run's policy from outside, and what became of their rewards by the run's ledger."""

from __future__ import annotations

import itertools
import runpy
import threading
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any
from urllib.error import HTTPError

from asyncrl.comm.ended_rollouts import Trained
from asyncrl.config.run_dir import LEDGER_DIR
from asyncrl.verify.audit.ledger_files import read_ledger, surviving

CLIENT = runpy.run_path(str(Path(__file__).parents[1] / "experiments" / "online_client.py"))
KINDS = ("plays", "plays", "plays", "plays", "is silent", "rejects", "reports twice", "reports another")


class Clients:
    """Threads that open sessions by `experiments/online_client.py`, ask once and report a reward, until the run ends.

    Each reward is another number, so that it is found again. With groups of one episode.

    Args:
        patience_s: for which no door need answer.
        think_s: at most this long they think before they report.

    Attributes:
        opened: number of sessions that were opened.
        accepted: rewards that a session has taken.
        doubtful: rewards whose reports were not answered.
        refused: calls that were refused, by status; 0 where nobody answered.
    """

    def __init__(self, run_dir: Path, threads: int, patience_s: float = 60.0, think_s: float = 0.3) -> None:
        self.opened = 0
        self.accepted: set[float] = set()
        self.doubtful: set[float] = set()
        self.refused: Counter[int] = Counter()
        self.failed: list[BaseException] = []
        self._run = CLIENT["Run"](run_dir, patience_s)
        self._think_s, self._never = think_s, threading.Event()
        self._numbers, self._lock = itertools.count(1), threading.Lock()
        self._threads = [threading.Thread(target=self._play, args=(seed,), daemon=True) for seed in range(threads)]
        for thread in self._threads:
            thread.start()

    def join(self, limit_s: float) -> None:
        """Wait for the end of all, now that the run is over; raise what one of them did not expect."""
        self._run.patience_s = 0.0
        for thread in self._threads:
            thread.join(limit_s)
        assert not any(thread.is_alive() for thread in self._threads)
        if self.failed:
            raise self.failed[0]

    def _play(self, seed: int) -> None:
        random = Random(seed)
        try:
            while True:
                (session,) = self._run.open()
                with self._lock:
                    self.opened += 1
                    reward = next(self._numbers) / 4096
                self._use(session, random, reward)
        except CLIENT["RunOver"]:
            return
        except BaseException as error:
            self.failed.append(error)

    def _use(self, session: Any, random: Random, reward: float) -> None:
        """Play one session; the run's deaths and the session's end are errors of its calls."""
        kind = random.choice(KINDS)
        try:
            session.ask("12+30=")
            if kind == "is silent":
                return
            if kind == "rejects":
                session.reject()
                return
            self._never.wait(random.uniform(0, self._think_s))
            self.doubtful.add(reward)
            session.reward(reward)
            self.accepted.add(reward)
            if kind == "reports twice":
                session.reward(reward)
            if kind == "reports another":
                session.reward(reward + 1000)
        except HTTPError as error:
            self.refused[error.code] += 1
        except OSError:
            self.refused[0] += 1

    def check(self, run_dir: Path) -> list[float]:
        """Return the rewards that the ledger says were trained: each once, and each one that a session has taken."""
        lines = surviving(read_ledger(run_dir / LEDGER_DIR, _no_finding), _no_finding)
        trained = [each.line.reward for each in lines if isinstance(each.line, Trained)]
        assert len(trained) == len(set(trained)), "a reward was used twice"
        assert set(trained) <= self.accepted | self.doubtful, "a reward was used that no client gave"
        return trained


def _no_finding(place: str, what: str) -> None:
    raise AssertionError(f"{place}: {what}")
