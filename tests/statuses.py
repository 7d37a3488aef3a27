"""The GserverManager's answer to who asks for its state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from asyncrl.comm.ended_rollouts import RolloutCounts
from asyncrl.manager.messages import GateState, ServerState, ServerStatus, StatusReply


def status_reply(
    *,
    running: int = 0,
    finished: int = 0,
    served: int = 0,
    dropped: Mapping[str, int] | None = None,
    idle_s: float = 0.0,
    loading: bool = False,
    able: bool = True,
    rebuilt: bool = True,
    used_up: bool = False,
    versions: Collection[int] = (),
    workers: Sequence[str] = (),
) -> StatusReply:
    """Return the state of a manager with one server of an unknown version, and one of each of `versions`.

    Args:
        loading: the servers load weights.
        able: they are not in quarantine.
    """
    state = ServerState.UPDATING if loading else ServerState.SERVING if able else ServerState.QUARANTINED
    servers = [
        ServerStatus(index, f"http://s{index}", state, version, None, "", 0, 0, 0)
        for index, version in enumerate((None, *versions))
    ]
    counts = RolloutCounts(running=running, finished_untrained=finished, dropped=dict(dropped or {}))
    gate = GateState(
        counts=counts, version=served, trained_version=served, limit=8, closed=False, idle_s=idle_s, used_up=used_up
    )
    return StatusReply(gate, servers, None, list(workers), rebuilt)
