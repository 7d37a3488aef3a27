"""The keys of name resolution: who is found under which name.

All keys are relative to the resolver's root, which holds experiment and trial, so that two trials never meet.

    workers/<kind>/<index>          a worker's request-reply server: JSON with endpoint and pid
    status/<kind>/<index>           a worker's status and, at the end, its exit reason
    trajectory_pullers/<dp>         address of a data-parallel head's trajectory puller
    trajectory_pushers/<index>      presence of a RolloutWorker (the pushers that the pullers are grouped for)
    generation_servers/<index>      a generation server: JSON with url, pid, backend, version
    gserver_manager                 URL of the GserverManager
    model_version/<role>            newest published policy version of a role: JSON with version and path
    data_state                      JSON: the file with the used prompts; the RolloutWorkers begin once it is there
"""

from __future__ import annotations


def worker_key(kind: str, index: int) -> str:
    """Address of worker `index` of `kind` (`model_worker`, `rollout_worker`, ...)."""
    return f"{workers_root(kind)}/{index}"


def workers_root(kind: str) -> str:
    """Subtree of all workers of `kind`."""
    return f"workers/{kind}"


def status_key(kind: str, index: int) -> str:
    """Status of worker `index` of `kind`."""
    return f"status/{kind}/{index}"


def status_root() -> str:
    """Subtree of every worker's status."""
    return "status"


def puller_key(dp: int) -> str:
    """Address of the trajectory puller of data-parallel head `dp`."""
    return f"{pullers_root()}/{dp}"


def pullers_root() -> str:
    """Subtree of all trajectory pullers."""
    return "trajectory_pullers"


def pusher_key(index: int) -> str:
    """Presence of the trajectory pusher of RolloutWorker `index`."""
    return f"{pushers_root()}/{index}"


def pushers_root() -> str:
    """Subtree of all trajectory pushers."""
    return "trajectory_pushers"


def gen_server_key(index: int) -> str:
    """URL of generation server `index`."""
    return f"{gen_servers_root()}/{index}"


def gen_servers_root() -> str:
    """Subtree of all generation servers."""
    return "generation_servers"


def manager_key() -> str:
    """URL of the GserverManager."""
    return "gserver_manager"


def model_version_key(role: str) -> str:
    """Newest published policy version of `role`: JSON with `version` and `path`."""
    return f"model_version/{role}"


def data_state_key() -> str:
    """Which prompts are used: present once the RolloutWorkers may begin."""
    return "data_state"


def index_of(key: str) -> int:
    """The index at the end of a worker's, puller's, pusher's or server's key.

    Raises:
        ValueError: the key's last component is no index.
    """
    last = key.rpartition("/")[2]
    if not last.isdecimal():
        raise ValueError(f"name {key!r} ends in {last!r}, expected an index, as in 'workers/actor/0'")
    return int(last)
