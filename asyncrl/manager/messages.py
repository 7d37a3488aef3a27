"""The messages of the GserverManager's HTTP interface: a type per request, JSON on the wire.

A request's type says where it is sent and what answers it (`Request`); both ends use these types. A message of another
type is refused with 400. The reply names the field's path and the expected type, for example `$.rollouts[0].order:
expected int, got str`. An unknown field is refused too.

A request with `timeout_s` is held until there is something to answer, that many seconds at most. A `WorkerRequest` also
renews the caller's lease, and reports which of its requests and rollouts ended.

Calls about rollouts name the manager that they are meant for. Another manager refuses them with 409: it first needs
`open_session` from a worker, `begin_run` from the master (`asyncrl.manager.rollouts.workers`). A manager whose gate is
not open yet answers `wait_expiring` and the calls of a `TrainerRequest` with 503, after a few seconds.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args

from msgspec import Meta, Struct

from asyncrl.comm.ended_rollouts import PolicyTokens, RolloutCounts

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]


class BadRequest(ValueError):
    """The request has its type, but cannot be answered; the message says why."""


class SessionRequired(BadRequest):
    """The call is meant for another manager; the caller must first report to this one."""


class NotRebuilt(BadRequest):
    """The manager waits for reports of other processes; the call may be repeated."""


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages."""


R = TypeVar("R", bound=Struct)


class Request(Message, Generic[R], frozen=True):
    """Base of the requests: `Request[<type of the reply>]`.

    Attributes:
        path: of its URL.
        reply: type of the answer.
    """

    path: ClassVar[str]
    reply: ClassVar[type[Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        (cls.reply,) = get_args(cls.__dict__["__orig_bases__"][0])


Method = tuple[type[Request[Any]], Callable[[Any], Awaitable[Struct]]]
"""A request's type and its handler."""


class Done(Message, frozen=True):
    """A reply without content."""

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
    """A request that needs a server. The same `request_id` again moves it.

    Attributes:
        rollout_id: None for an evaluation.
        affinity: the conversation whose cache the request can use.
        min_version: least version of the server; None: the version of the rollout's admission.
        policy: name in `policies`; empty: the run's own policy. The versions of a policy that is not trained do not
            count.
    """

    request_id: Name
    rollout_id: str | None
    affinity: str = ""
    min_version: int | None = None
    policy: str = ""


class Route(Message, frozen=True, omit_defaults=True):
    """The chosen server, and the policy version that it served at that time.

    Attributes:
        expires_at: set by the client and never sent: from then on, in seconds of its event loop's clock, the client
            asks again, as the server may have left service.
    """

    url: str
    version: int
    expires_at: float = math.inf


class FinishedRollout(Message, frozen=True):
    """The end of a rollout.

    Attributes:
        accepted: a rank has acknowledged it; else it is dropped for `reason`.
        return_prompt: its prompt is tried again.
        as_next_attempt: a filter rejected the try, so the prompt is tried again after other prompts, with new random
            numbers. False: the try failed.
        success: share of right answers, if there is a curriculum.
    """

    rollout_id: Name
    accepted: bool
    reason: str = ""
    return_prompt: bool = False
    as_next_attempt: bool = False
    success: float | None = None


class WorkerRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    """A call of a worker, which also reports ended requests and rollouts.

    Attributes:
        worker: `<kind>/<index>`.
        incarnation: number of the worker's processes that died before the caller. The first call of a new process ends
            the rollouts of the earlier ones, whose calls are refused from then on.
        manager: number of the manager that the call is meant for.
        released: ids of ended requests.
        finished: ended rollouts.
    """

    worker: Name
    incarnation: Count = 0
    manager: Count = 0
    released: list[str] = []
    finished: list[FinishedRollout] = []


class GrantedRollout(Message, frozen=True):
    """A rollout that may run. All its tokens will have `version` or a newer one.

    Attributes:
        order: position of the prompt in the data order.
        row: row of the prompt in the data.
        attempt: number of times that filters returned the prompt; its random numbers depend on it.
        failures: number of tries of the prompt that raised.
        route: server of its first request, placed under the rollout's id. None if no server takes requests now, or if
            admissions choose no server.
        skips: the curriculum leaves the prompt out: the worker drops the rollout at once.
    """

    rollout_id: str
    prompt_id: str
    order: Count
    row: Count
    attempt: Count
    failures: Count
    version: int
    route: Route | None = None
    skips: bool = False


class FinishRequest(WorkerRequest[Done], frozen=True):
    """Report of ended requests and rollouts, sent if no other call carries it."""

    path = "/finish_rollout"


class AllocateReply(Message, frozen=True):
    """Admitted rollouts with their prompts, under a prefix of the request's ids, and the served version.

    Attributes:
        closed: no rollout will start any more.
        gone: ids that will not start. They were granted in a reply that was late or lost, and were dropped since.
    """

    granted: list[GrantedRollout]
    version: int
    closed: bool
    gone: list[str] = []


class AllocateRequest(WorkerRequest[AllocateReply], frozen=True, kw_only=True):
    """Request prompts, one for each rollout that the worker has room for. Each rollout has a new id."""

    path = "/allocate_rollout"

    rollouts: list[Name]
    timeout_s: Seconds = 0.0


class HeldRollout(Message, frozen=True, omit_defaults=True):
    """A rollout that a worker holds: its grant, and its `end` if it has one that no manager has confirmed."""

    granted: GrantedRollout
    end: FinishedRollout | None = None


class Session(Message, frozen=True):
    """The number of the manager, which the caller's next calls name."""

    manager: Count


class HeldReport(Request[Session], frozen=True):
    """All rollouts that the process of `worker` holds; it opens a session with the manager.

    Attributes:
        launch: the launch that the process belongs to, as in name resolution; "" if it was started by hand.
        host: address of its host; "" if that is not known.
    """

    path = "/open_session"

    worker: Name
    incarnation: Count = 0
    held: list[HeldRollout] = []
    launch: str = ""
    host: str = ""


class ScheduleReply(Message, frozen=True):
    """The servers of the requests that have one now, by request."""

    scheduled: dict[str, Route]


class ScheduleRequest(WorkerRequest[ScheduleReply], frozen=True, kw_only=True):
    """Place `requests`."""

    path = "/schedule_request"

    requests: list[RouteRequest]
    timeout_s: Seconds = 0.0


class LostServersReply(Message, frozen=True):
    """URLs of the servers that were lost, and the number of the last loss."""

    seq: int
    urls: list[str]


class LostServersRequest(WorkerRequest[LostServersReply], frozen=True, kw_only=True):
    """Ask for the servers that left service unexpectedly since loss number `after`; -1: only for the number."""

    path = "/lost_servers"

    after: int
    timeout_s: Seconds = 0.0


class WaitExpiringReply(Message, frozen=True):
    """The rollouts that the step has to wait for; none if it can be taken."""

    running: list[str]


class WaitExpiringRequest(Request[WaitExpiringReply], frozen=True):
    """Wait until the step at policy version `version` makes no running rollout expire."""

    path = "/wait_expiring"

    version: Count
    timeout_s: Seconds = 0.0


class WaitAsleepReply(Message, frozen=True):
    """Servers that the turn still waits for, as text; empty if the trainer has the devices.

    Attributes:
        others: servers elsewhere that serve, or will once they are updated.
        wake_s: time from its turn until it served that the last woken colocated server took.
    """

    waits_for: list[str]
    others: Count = 0
    wake_s: Seconds = 0.0


class WaitAsleepRequest(Request[WaitAsleepReply], frozen=True):
    """Wait until no colocated server has memory on the trainer's devices, in the trainer's turn of this number."""

    path = "/wait_asleep"

    turn: Count
    timeout_s: Seconds = 0.0


class DroppedRollout(Message, frozen=True):
    """A rollout that the trainer received and will not train."""

    rollout_id: Name
    reason: Name


class ReceivedRollout(Message, frozen=True):
    """A rollout that the trainer has; `version` is that of its oldest token."""

    rollout_id: Name
    prompt_id: str
    order: Count
    version: Count
    tokens: Count


class TrainerRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    """A call of the master or recorder. `manager`: number of the manager that it is meant for."""

    manager: Count = 0


class ReceivedReply(Message, frozen=True):
    """The ids among them that do not count: they must not be trained."""

    refused: list[str] = []


class ReceivedReport(TrainerRequest[ReceivedReply], frozen=True):
    """The trainer has received these rollouts."""

    path = "/received"

    rollouts: list[ReceivedRollout]


class TrainedRollout(Message, frozen=True):
    """A rollout that a step trained, with what its line in the ledger says (`ended_rollouts.Trained`)."""

    rollout_id: Name
    prompt_id: str
    order: Count
    versions: dict[int, Count]
    episodes: Count
    samples: Count
    reward: float
    policy_servers: dict[str, tuple[int, int]] = {}
    policies: dict[str, PolicyTokens] = {}


class ConsumedReply(Message, frozen=True):
    """The gate's state, which includes the report.

    Attributes:
        checkpoint: as of the line of the step that was reported; None if none was.
        idle_s: seconds so far in which no rollout ran because the gate was full.
        versions_in_use: versions that servers serve or load.
    """

    counts: RolloutCounts
    checkpoint: GateCheckpoint | None
    idle_s: float = 0.0
    versions_in_use: list[Count] = []


class ConsumedReport(TrainerRequest[ConsumedReply], frozen=True):
    """The trainer is at `version`, whose step trained `trained` if that was not reported yet; `dropped` will never be
    trained.
    """

    path = "/consumed"

    version: Count
    trained: list[TrainedRollout] = []
    dropped: list[DroppedRollout] = []


class CloseGate(TrainerRequest[Done], frozen=True):
    """No rollout starts from now on."""

    path = "/close_gate"


class EndReport(TrainerRequest[RolloutCounts], frozen=True):
    """The run ends at `version`: no rollout starts any more, and live ones are abandoned."""

    path = "/end_run"

    version: Count


class GateCheckpoint(Message, frozen=True, kw_only=True):
    """The gate's part of a checkpoint. Live rollouts are not in it: their workers and the trainer have them.

    Attributes:
        used: prompts that are trained or dropped for good (`UsedPrompts.to_json`).
        dropped: number of rollouts by reason.
        retries: order, attempt and failures of prompts that were tried before and are not used.
        curriculum: its state; None if there is none.
        line: number of the ledger's lines, which lead to this state.
    """

    used: dict[str, Any] | None = None
    dropped: dict[str, Count] = {}
    retries: list[tuple[Count, Count, Count]] = []
    curriculum: Any = None
    line: Count = 0

    @property
    def prompts_used(self) -> int:
        """Number of used prompts."""
        return 0 if self.used is None else int(self.used["count"])

    def counts(self, trained: int) -> RolloutCounts:
        """Return the counters of a gate that continues from here with `trained` rollouts."""
        dropped = {reason: count for reason, count in self.dropped.items() if count}
        return RolloutCounts(trained + sum(dropped.values()), trained, dropped)


class RunBegin(Request[Session], frozen=True):
    """The run begins or continues at `version`, from `checkpoint`; the trainer has `received` these rollouts."""

    path = "/begin_run"

    version: Count = 0
    checkpoint: GateCheckpoint = GateCheckpoint()
    received: list[ReceivedRollout] = []


class GateState(Message, frozen=True, kw_only=True):
    """The gate.

    Attributes:
        version: version that is served.
        trained_version: version of the trainer.
        limit: number of rollouts that may be trained or live.
        idle_s: seconds so far in which no rollout ran because the gate was full.
        used_up: no rollout runs, and no prompt of the last epoch is left to begin one of.
    """

    counts: RolloutCounts
    version: int
    trained_version: int
    limit: int
    closed: bool
    idle_s: float
    used_up: bool = False


class ServerState(StrEnum):
    """State of a server (diagram in `asyncrl.manager.fleet.decisions`)."""

    SERVING = "serving"
    DRAINING = "draining"
    UPDATING = "updating"
    QUARANTINED = "quarantined"
    RELEASING = "releasing"
    ASLEEP = "asleep"


class ServerStatus(Message, frozen=True):
    """A generation server: its state, served version and goal, and the load placed on it.

    Attributes:
        policy: name in `policies` of the policy that it serves; empty: the run's own policy.
    """

    index: int
    url: str
    state: ServerState
    version: int | None
    goal: int | None
    reason: str
    failures: int
    sequences: int
    tokens: int
    policy: str = ""


class StatusReply(Message, frozen=True):
    """The manager's state, for display and for the master; `servers` of all policies."""

    gate: GateState
    servers: list[ServerStatus]
    newest_version: int | None
    workers: list[str]
    rebuilt: bool = True
    """False while the manager waits for the master and the workers to report; the counters are zeros until then."""

    @property
    def versions_in_use(self) -> set[int]:
        """Versions that servers serve or load."""
        in_use = {version for server in self.servers for version in (server.version, server.goal)}
        return {version for version in in_use if version is not None}

    @property
    def loading(self) -> bool:
        """True if a server loads weights, in its first attempt."""
        return any(server.state == ServerState.UPDATING and not server.failures for server in self.servers)

    @property
    def able(self) -> bool:
        """True if a server of the run's own policy is not in quarantine."""
        return any(server.state != ServerState.QUARANTINED for server in self.servers if not server.policy)

    def describe(self) -> str:
        """Return the state as one readable line."""
        gate, counts = self.gate, self.gate.counts
        shown = ", ".join(
            f"{each.policy}{each.index} {each.state} v{each.version} ({each.sequences} running)"
            for each in self.servers
        )
        if not self.rebuilt:
            return f"the gate is shut until the MasterWorker and all RolloutWorkers report; servers: {shown or 'none'}"
        return (
            f"gate: trained {counts.trained} + finished {counts.finished_untrained} + running {counts.running} of "
            f"{gate.limit} allowed at served version {gate.version}; servers: {shown or 'none'}"
        )


class StatusRequest(Request[StatusReply], frozen=True):
    """Ask for the manager's state."""

    path = "/status"
