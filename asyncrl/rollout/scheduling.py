"""What the rollout client needs of the GserverManager: a server for a request, and whom to tell when it is done."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol


class SchedulerGone(RuntimeError):
    """The manager did not answer for as long as calls are repeated."""


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """A request for `n` continuations of at most `max_new_tokens` each.

    `rollout_id` is None for evaluation; `affinity` names the conversation whose cache it can use; None as `min_version`
    leaves the version to the rollout's admission.
    """

    request_id: str
    rollout_id: str | None
    prompt_tokens: int
    max_new_tokens: int
    n: int
    affinity: str
    min_version: int | None


@dataclass(frozen=True, slots=True)
class RequestSize:
    """What a request for `n` continuations of at most `max_new_tokens` each will ask of a server."""

    prompt_tokens: int
    max_new_tokens: int
    n: int


@dataclass(frozen=True, slots=True)
class Route:
    """The server that was chosen, and the policy version it served at that time.

    `expires_at`, in seconds of the event loop's clock: a server may leave service, so later one asks again.
    """

    url: str
    version: int
    expires_at: float = field(default=math.inf, compare=False)


class Scheduler(Protocol):
    """The GserverManager; `asyncrl.manager.client.ManagerClient` is one."""

    async def schedule(self, request: ScheduleRequest, timeout_s: float) -> Route | None:
        """A server for `request`; None where there was none for `timeout_s`. The same id again moves the request."""
        ...

    def release(self, request_id: str) -> None:
        """The request is over. May be repeated."""
        ...

    async def lost_servers(self, after: int, timeout_s: float) -> tuple[int, list[str]]:
        """URLs of servers that left service unexpectedly since loss number `after`, and the number of the last one."""
        ...
