"""Copy lines of `observed/` from hosts without a shared folder to the run's folder on the launcher's host.

On such a host `ObservedLines` collects new lines, and its staging server sends them. On the launcher's host
`ObservedHome` appends them to the file of the same name, with times on the launcher's clock. Lines are numbered, so a
line that is sent twice is appended once. After a restart of either end, lines that are not newer than those in the file
are skipped.

`HostClock` estimates how far the host's clock is ahead, as NTP does: a reply contains its time, which is between the
request and the reply's arrival. The exchange with the shortest round trip is the most accurate.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl.comm.files import retry_write_blocking
from asyncrl.config.run_dir import OBSERVED_DIR
from asyncrl.observe.observer import append_line
from asyncrl.observe.status import OLDER
from asyncrl.observe.tail import Appended, ReadAgain
from asyncrl.staging.client import ObservedRequest

_log = logging.getLogger(__name__)
_FILE = re.compile(r"[a-z_]{1,40}-\d{1,6}\.jsonl")
_TIMES: Final = ("at", "since", "begin", "end")
_LAST_BYTES: Final = 64 << 10
HOME_FILE: Final = ".home"
MOST_WAITING: Final = 10_000
"""Lines of a process that wait in memory for a connection; later ones wait in its file."""
EXCHANGES: Final = 30
"""Number of exchanges used for the estimate of a clock: one every two seconds, so those of the last minute."""


class ObservedLines:
    """The lines in `observed/` of `run_dir` that have not arrived yet."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / OBSERVED_DIR
        self._sender = secrets.token_hex(8)
        self.home = ""
        """Id of the launcher's folder, once it is known."""
        self._files: dict[str, Appended] = {}
        self._waiting: dict[str, deque[str]] = {}
        self._arrived: Counter[str] = Counter()

    @property
    def are_home(self) -> bool:
        """True if this folder is the launcher's, whose id is `home`."""
        file = self._folder / HOME_FILE
        return file.is_file() and file.read_text() == self.home

    def take(self, limit: int, ahead_s: float = 0.0) -> ObservedRequest:
        """Return up to `limit` characters of lines, the oldest first; the same again until `arrived`."""
        for file in sorted(self._folder.glob("*.jsonl")):
            self._read(file)
        found: dict[str, list[str]] = {}
        for name, lines in self._waiting.items():
            for line in lines:
                limit -= len(line)
                if limit < 0:
                    break
                found.setdefault(name, []).append(line)
        return ObservedRequest(self._sender, {name: self._arrived[name] for name in found}, found, ahead_s)

    def arrived(self, sent: ObservedRequest) -> None:
        """Forget the lines of `sent`."""
        for name, lines in sent.lines.items():
            self._arrived[name] += len(lines)
            for _ in lines:
                self._waiting[name].popleft()

    def _read(self, file: Path) -> None:
        waiting = self._waiting.setdefault(file.name, deque())
        if len(waiting) > MOST_WAITING:  # the launcher's host does not answer; later lines stay in the file
            return
        if file.name not in self._files:
            self._files[file.name] = Appended(file)
            waiting += map(_text, Appended(file.with_name(file.name + OLDER)).read())
        reader = self._files[file.name]
        previous = reader.moved_to(file.with_name(file.name + OLDER))
        try:
            waiting += map(_text, reader.read())
        except ReadAgain:  # it was full, and is the previous file now; what was read of it must not come twice
            waiting += map(_text, _rest_of(previous))
            waiting += map(_text, reader.read())


def _rest_of(previous: Appended) -> list[bytes]:
    """Return the unread lines of a file that was full; all lines of the file that has its name now if another was full
    meanwhile.
    """
    try:
        return previous.read()
    except ReadAgain:
        return previous.read()


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


@dataclass
class _Arrival:
    """State of a file's arrival: its sender, the number of its newest line, and the newest time in it before this
    sender.
    """

    sender: str
    next: int
    known: float


class ObservedHome:
    """Appends lines of other hosts to `observed/` of `run_dir`."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / OBSERVED_DIR
        self._arrivals: dict[str, _Arrival] = {}
        self.id = secrets.token_hex(8)
        """Id written into the folder, so that a host that sees this folder after all sends nothing."""
        retry_write_blocking(self._begin, f"{self._folder}", _log)

    def _begin(self) -> None:
        self._folder.mkdir(exist_ok=True)
        (self._folder / HOME_FILE).write_text(self.id)

    def append(self, sent: ObservedRequest) -> None:
        """Append the lines of `sent`, their times less what that host's clock is ahead.

        Raises:
            ValueError: a name is not of a file in `observed/`.
            OSError: a file cannot be written.
        """
        if strange := [name for name in sent.lines if not _FILE.fullmatch(name)]:
            raise ValueError(f"no file of observed/: {strange[0][:200]!r}")
        for name, lines in sent.lines.items():
            file, first = self._folder / name, sent.first.get(name, 0)
            arrival = self._arrivals.get(name)
            if arrival is None or arrival.sender != sent.sender:
                arrival = self._arrivals[name] = _Arrival(sent.sender, first, _newest_in(file))
            for number, text in enumerate(lines, first):
                line = _shifted(text, sent.ahead_s) if number >= arrival.next else None
                if line is not None and _time_of(line) > arrival.known:
                    append_line(file, json.dumps(line).encode() + b"\n")
                arrival.next = max(arrival.next, number + 1)


def _shifted(text: str, ahead_s: float) -> dict[str, Any] | None:
    """Return the line with its times on the launcher's clock; None if it is not a valid line."""
    try:
        line = json.loads(text)
        moved = {key: round(line[key] - ahead_s, 3) for key in _TIMES if key in line}
        return line | moved if "at" in moved or "end" in moved else None
    except (ValueError, TypeError, RecursionError):  # cut by a full disk, or not written by asyncrl
        return None


def _time_of(line: Mapping[str, Any]) -> float:
    return float(line["end"] if "span" in line else line["at"])


def _newest_in(file: Path) -> float:
    """Return the newest time in the end of `file`; 0 if the file does not exist."""
    if not file.is_file():
        return 0.0
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - _LAST_BYTES))
        lines = [_shifted(_text(raw), 0.0) for raw in stream.read().splitlines()]
    return max((_time_of(line) for line in lines if line is not None), default=0.0)


class HostClock:
    """Estimate of how far this host's clock is ahead of another one's."""

    def __init__(self) -> None:
        self._exchanges: deque[tuple[float, float]] = deque(maxlen=EXCHANGES)

    def exchanged(self, asked_at: float, their_time: float, answered_at: float) -> None:
        """Record an exchange: times of request and reply on this clock, and the time on the other clock in between."""
        within_s = max(answered_at - asked_at, 0.0) / 2
        self._exchanges.append((within_s, (asked_at + answered_at) / 2 - their_time))

    def figures(self) -> dict[str, float]:
        """Return the estimate `clock_ahead_s` and its largest error; empty before the first exchange."""
        if not self._exchanges:
            return {}
        within_s, ahead_s = min(self._exchanges)
        return {"clock_ahead_s": round(ahead_s, 4), "clock_within_s": round(within_s, 4)}

    @property
    def ahead_s(self) -> float | None:
        """The estimate; None before the first exchange."""
        return min(self._exchanges)[1] if self._exchanges else None
