"""The messages of the GserverManager's HTTP interface: one request and one reply type a verb, JSON on the wire.

    POST /open_session       HeldReport            Session
    POST /report_run         RunReport             Session
    POST /allocate_rollout   AllocateRequest       AllocateReply       held: until there is room
    POST /schedule_request   ScheduleRequest       ScheduleReply       held: until a server takes requests
    POST /lost_servers       LostServersRequest    LostServersReply    held: until a server leaves service
    POST /wait_expiring      WaitExpiringRequest   WaitExpiringReply   held: until nothing would expire
    POST /finish_rollout     FinishRequest         Done
    POST /report_consumed    ConsumedReport        ConsumedReply
    POST /close_gate         Empty                 Done
    POST /abandon            Empty                 Books
    GET  /books              Empty                 Books
    GET  /status             Empty                 StatusReply

Both ends use these types. What arrives and is not of its type is refused with 400, with the field's path and what was
expected of it, for example `$.rollouts[0].order: expected int, got str`; an unknown field is refused too.

A request that is held takes `timeout_s` seconds at most. A `WorkerRequest` is also the caller's sign of life, and tells
which of its requests and rollouts ended.

Calls about rollouts name the manager that they are meant for. Another one refuses them with 409: it first wants
`open_session` of a worker, `report_run` of the master (`asyncrl.manager.rebuild`). A manager that is not rebuilt yet
answers `report_consumed`, `wait_expiring`, `close_gate` and `abandon` with 503, after a while.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from msgspec import Meta, Struct

from asyncrl.comm.ledger_lines import Admitted, RolloutLine

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]


class BadRequest(ValueError):
    """The request is of its type and still not one that can be answered; the message says what is wrong."""


class NotIntroduced(BadRequest):
    """The call is meant for another manager, or this one must first be told what it does not know."""


class NotRebuilt(BadRequest):
    """The manager waits for others to say what they have; the call may be made again."""


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages."""


Verb = tuple[type[Message], Callable[[Any], Awaitable[Message]]]
"""A request's type and what answers it."""


class Empty(Message, frozen=True):
    """A request that says nothing but its verb."""


class Done(Message, frozen=True):
    """The reply to a verb that has nothing to tell."""

    ok: bool = True


class RequestSize(Message, frozen=True):
    """Size of a request to a server for `n` continuations of at most `max_new_tokens` tokens each."""

    prompt_tokens: Count
    max_new_tokens: Count
    n: Count

    @property
    def tokens(self) -> int:
        """Tokens to prefill and to generate at most."""
        return self.prompt_tokens + self.n * self.max_new_tokens


class RouteRequest(RequestSize, frozen=True, kw_only=True):
    """A request that wants a server. The same `request_id` again moves it.

    `rollout_id` is None for evaluation; `affinity` names the conversation whose cache it can use; None as `min_version`
    leaves the version to the rollout's admission. `policy` is one of `policies`, whose versions do not count; empty:
    the trained one.
    """

    request_id: Name
    rollout_id: str | None
    affinity: str = ""
    min_version: int | None = None
    policy: str = ""


class Route(Message, frozen=True, omit_defaults=True):
    """The server that was chosen, and the policy version it served at that time.

    `expires_at` is the client's own knowledge and never sent: later than this, in seconds of its event loop's clock, it
    asks again, as the server may have left service.
    """

    url: str
    version: int
    expires_at: float = math.inf


class FinishedRollout(Message, frozen=True):
    """The end of a rollout: `accepted` once the trainer has acknowledged it, else dropped for `reason`.

    `return_prompt`: its prompt is to be tried again, as the try failed; `as_next_attempt`: with other random numbers,
    after other prompts, as a filter rejected the try.
    `success`: the share of its answers that are right, where a curriculum asks for it.
    """

    rollout_id: Name
    accepted: bool
    reason: str = ""
    return_prompt: bool = False
    tokens: Count = 0
    as_next_attempt: bool = False
    success: float | None = None


class WorkerRequest(Message, frozen=True, kw_only=True):
    """A call in the name of `worker`, `<kind>/<index>`, which also tells what ended: request ids and rollouts.

    `incarnation`: how many of the worker's processes died before the one that calls. The first call of a later one ends
    the tickets of those before it, which are refused from then on. `manager`: the number of the one that is meant.
    """

    worker: Name
    incarnation: Count = 0
    manager: Count = 0
    released: list[str] = []
    finished: list[FinishedRollout] = []


class FinishRequest(WorkerRequest, frozen=True):
    """Report of ended requests and rollouts, sent if no other call carries it."""


class AllocateRequest(WorkerRequest, frozen=True, kw_only=True):
    """Ask for prompts, one for each id of a rollout that the worker has room for; an id is new for each rollout."""

    rollouts: list[Name]
    timeout_s: Seconds = 0.0


class GrantedRollout(Message, frozen=True):
    """A rollout that may run, of the prompt at `order` of the data order; every token of it will be of `version` or
    newer.

    `attempt`: how often filters have returned the prompt, which its random numbers depend on. `failures`: how many of
    its tries have raised. `route`: where its first request goes, placed under the rollout's id; None where no server
    takes requests now, or admissions bring none. `rests`: it is not to run, but to be dropped at once, as the
    curriculum leaves it out.
    """

    rollout_id: str
    prompt_id: str
    order: Count
    row: Count
    attempt: Count
    failures: Count
    version: int
    route: Route | None = None
    rests: bool = False


class AllocateReply(Message, frozen=True):
    """Admitted rollouts with their prompts, under a prefix of the request's ids, and the served version.

    `closed`: no rollout will start any more. `gone`: those of the ids that will not start. They were granted once, in
    a reply that came late or never, and given up since.
    """

    granted: list[GrantedRollout]
    version: int
    closed: bool
    gone: list[str] = []


class HeldRollout(Message, frozen=True, omit_defaults=True):
    """A rollout in the hands of a worker: what it was granted, and its `end` once it has one that is not told yet."""

    granted: GrantedRollout
    end: FinishedRollout | None = None


class HeldReport(Message, frozen=True):
    """All rollouts that the process of `worker` holds; with this it opens a session with the manager."""

    worker: Name
    incarnation: Count = 0
    held: list[HeldRollout] = []


class Session(Message, frozen=True):
    """The number of the manager, which is to be named in calls from now on."""

    manager: Count


class ScheduleRequest(WorkerRequest, frozen=True, kw_only=True):
    """Place `requests`."""

    requests: list[RouteRequest]
    timeout_s: Seconds = 0.0


class ScheduledRequest(Message, frozen=True):
    """Server of a request: its index, URL and version."""

    request_id: str
    server: int
    url: str
    version: int


class ScheduleReply(Message, frozen=True):
    """The requests that have a server now."""

    scheduled: list[ScheduledRequest]


class LostServersRequest(WorkerRequest, frozen=True, kw_only=True):
    """Ask for the servers that left service unexpectedly since loss number `after`; -1: only for the number."""

    after: int
    timeout_s: Seconds = 0.0


class LostServersReply(Message, frozen=True):
    """URLs of the servers that were lost, and the number of the last loss."""

    seq: int
    urls: list[str]


class WaitExpiringRequest(Message, frozen=True):
    """Wait until the step at policy version `version` makes no running rollout expire."""

    version: Count
    timeout_s: Seconds = 0.0


class WaitExpiringReply(Message, frozen=True):
    """The rollouts that are still waited for; `clear`: none."""

    clear: bool
    running: list[str]


class DroppedRollout(Message, frozen=True):
    """A rollout that the trainer received and will not train.

    `used`: its prompt is trained, or dropped for good.
    """

    rollout_id: Name
    reason: Name
    used: bool = False


class ReceivedRollout(Message, frozen=True):
    """A rollout that the trainer has; `version` is that of its oldest token."""

    rollout_id: Name
    prompt_id: str
    order: Count
    version: Count
    tokens: Count


class ConsumedReport(Message, frozen=True):
    """The optimizer consumed `trained` and is at `version`; `dropped` will never be trained.

    `unknown`: those of `trained` that the ledger does not have open. They enter the books now if the manager does not
    know them either: they came to a rank after their worker and the manager before this one had died.
    `manager`: the number of the one that is meant. `events_after`: the lines about rollouts that the ledger has from
    this manager; `measured_after`: the highest number of a measured success rate that the caller has kept.
    """

    version: Count
    trained: list[str]
    dropped: list[DroppedRollout]
    unknown: list[ReceivedRollout] = []
    manager: Count = 0
    events_after: Count = 0
    measured_after: Count = 0


class RunReport(Message, frozen=True, kw_only=True):
    """All that the trainer's side knows of the run, for a manager that begins; the defaults are a run's beginning.

    What the ledger's lines add up to: `version` (steps), `dropped` by reason, `abandoned`, rollouts without an `end`
    (`open`), those of them that are `finished`, `ended` ones by outcome (neighbours that left the same way form one
    entry), admissions of those among them that may come back (`lost`), and of prompts that wait and whose next try is
    not their first: order, attempt, failures (`retries`).

    `used`: prompts that are trained or dropped for good (`UsedPrompts.to_json`). `received`: what waits at the ranks,
    polled after this manager was there. `consumed`: what is to be reported next. `curriculum`: its state. `closed`: no
    rollout is to start; `abandoned_all`: what is live is abandoned.
    """

    version: Count = 0
    dropped: dict[str, Count] = {}
    abandoned: Count = 0
    open: list[Admitted] = []
    finished: list[str] = []
    ended: list[tuple[str, list[str]]] = []
    lost: list[Admitted] = []
    retries: list[tuple[Count, Count, Count]] = []
    used: dict[str, Any] | None = None
    received: list[ReceivedRollout] = []
    consumed: ConsumedReport | None = None
    curriculum: Any = None
    closed: bool = False
    abandoned_all: bool = False


class GateBooks(Message, frozen=True):
    """The gate's ledger: `submitted = trained + dropped + abandoned + running + finished_untrained`, always."""

    submitted: int
    trained: int
    dropped: dict[str, int]
    abandoned: int
    running: int = 0
    finished_untrained: int = 0

    @property
    def balanced(self) -> bool:
        """True if every submitted rollout is accounted for."""
        left = self.trained + sum(self.dropped.values()) + self.abandoned
        return self.submitted == left + self.running + self.finished_untrained


class Books(GateBooks, frozen=True, kw_only=True):
    """The ledger with the versions it belongs to: the one served, and the trainer's."""

    version: int
    trained_version: int


class ConsumedReply(Message, frozen=True):
    """The books with the report in them, and what became of rollouts up to these books.

    `events`: the lines since `events_after`; the last has number `events_seq`. `measured`: prompts with their success,
    where there is a curriculum; the last has number `measured_seq`. `idle_s`: for how long no rollout ran so far, as
    the gate let none start; `versions_in_use`: what servers serve or load.
    """

    books: Books
    events: list[RolloutLine] = []
    events_seq: Count = 0
    measured: list[tuple[str, float]] = []
    measured_seq: Count = 0
    idle_s: float = 0.0
    versions_in_use: list[Count] = []


class GateState(Books, frozen=True, kw_only=True):
    """The gate: its books, how many rollouts it allows, and for how many seconds it let none run so far."""

    limit: int
    closed: bool
    idle_s: float


class ServerStatus(Message, frozen=True):
    """A generation server: its state (`ServerState`), versions served and aimed at, and what is placed on it.

    `policy`: the one of `policies` that it serves, empty for the trained one.
    """

    index: int
    url: str
    state: str
    version: int | None
    goal: int | None
    reason: str
    failures: int
    sequences: int
    tokens: int
    policy: str = ""


class StatusReply(Message, frozen=True):
    """The manager's state, for people and for the master."""

    gate: GateState
    servers: list[ServerStatus]
    newest_version: int | None
    workers: list[str]
    opponents: list[ServerStatus] = []
