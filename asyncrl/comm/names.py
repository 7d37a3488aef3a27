"""The keys of name resolution and their values.

All keys are relative to the resolver's root, which contains experiment and trial, so that trials are separate.

    run                             the launcher that holds the trial: `TrialHolder`
    launch                          the launch whose processes own these names; processes of other launches end
    incarnations/<kind>/<index>     number of a worker's replaced processes (none: 0); a replaced process ends
    killed/<kind>/<index>           the same number after the last death by a kill from outside; written before it
    workers/<kind>/<index>          a worker's request-reply server: `WorkerAddress`
    status/<kind>/<index>           a worker's status and, at the end, its exit reason: `WorkerStatus`
    trajectory_pullers/<dp>         address of a data-parallel head's trajectory puller
    trajectory_pushers/<index>      presence of a RolloutWorker (the pushers that the pullers are grouped for)
    generation_servers/<index>      a generation server: `GenerationServerEntry`
    policy_servers/<index>          a server of one of `policies`: `GenerationServerEntry`
    joined/<kind>/<index>           the command that added a worker to the running run
    encoder_servers/<index>         URL of an EncoderServer
    staging_servers/<index>         URL of the staging server of a host; 0 is on the launcher's
    staged/<folder>/<host>          where the initial model, or what RolloutWorkers read, is on the host of that address
    gserver_manager                 URL of the GserverManager
    model_version/<role>            newest published policy version of a role: `PublishedVersion`
    trainer_turn                    owner of the devices that trainer and colocated servers share, at first the trainer:
                                    `TrainerTurn`
    loading_servers/<index>         a colocated server that loads its model, or is about to
    server_memory/<index>           a colocated server whose memory is released, or may be: `ServerMemory`
    training_world                  the file in which the training ranks meet

If a type is named, the value is its fields as a JSON object, made with `encode` and read with `decode`.

What has no lease outlives a killed launcher: `launch`, `incarnations`, `killed`, `model_version`, `trainer_turn`,
`server_memory` and the last status of a process that had ended; the next launch removes what it does not continue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self, TypeAlias

import msgspec

from asyncrl.comm.typed import decode_json

MODEL_WORKER = "model_worker"
GENERATION_SERVER = "generation_server"
POLICY_SERVER = "policy_server"
ENCODER_SERVER = "encoder_server"
ROLLOUT_WORKER = "rollout_worker"
STAGING_SERVER = "staging_server"
GSERVER_MANAGER = "gserver_manager"
MASTER_WORKER = "master_worker"
RECORDER = "recorder"
EVALUATION_WORKER = "evaluation_worker"
EVALUATION_MASTER = "evaluation_master"
"""The kinds of processes; `asyncrl.runtime.plan` describes each."""
ACTOR = "actor"
"""The role whose weights the generation servers load."""

WinRatesOfPools: TypeAlias = Mapping[str, Mapping[int, float]]
"""Win rate of the run's own policy, by pool of older versions and member."""
State: TypeAlias = Literal["starting", "ready", "done", "failed"]

# Entries.
TRIAL_KEY = "run"
LAUNCH_KEY = "launch"
MANAGER_KEY = "gserver_manager"
TRAINER_TURN_KEY = "trainer_turn"
TRAINING_WORLD_KEY = "training_world"

# Subtrees.
WORKERS = "workers"
STATUSES = "status"
INCARNATIONS = "incarnations"
KILLED = "killed"
PULLERS = "trajectory_pullers"
PUSHERS = "trajectory_pushers"
GENERATION_SERVERS = "generation_servers"
POLICY_SERVERS = "policy_servers"
ENCODER_SERVERS = "encoder_servers"
STAGING_SERVERS = "staging_servers"
LOADING_COLOCATED = "loading_servers"
SERVER_MEMORY = "server_memory"
JOINED = "joined"


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    def encode(self) -> str:
        """Return the value to put into name resolution."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, value: str) -> Self:
        """Return the entry that `value` encodes.

        Raises:
            ValueError: `value` is not such an entry. The message has the path of the first wrong field and the expected
                type.
        """
        try:
            return decode_json(value, cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"name resolution holds {value!r:.200}, which is no {cls.__name__}: {error}") from error


class TrialHolder(_Entry, frozen=True):
    """The launcher that holds a trial.

    `launch` is random; `pid` and `started` (kernel ticks since boot) identify its process for readers on the same
    `machine`; `since` is for display. `detached` is true if it has no terminal, and others may attach to it. `folder`
    is where it was started: relative paths in the settings start there. `number` grows from launch to launch of the
    trial.
    """

    launch: str
    host: str
    machine: str
    pid: int
    started: int
    since: str
    run_dir: str
    detached: bool = False
    folder: str = ""
    number: int = 0


class WorkerAddress(_Entry, frozen=True):
    """Address of a worker's request-reply server."""

    endpoint: str
    pid: int


class WorkerStatus(_Entry, frozen=True):
    """State of a worker. `reason` is the cause of its failure, `incarnation` is the number of its predecessors that
    died, and `progress` counts signs of work while it starts.
    """

    state: State
    pid: int
    reason: str = ""
    incarnation: int = 0
    progress: int = 0


class GenerationServerEntry(_Entry, frozen=True):
    """An engine at `url`, with the weights of `version`.

    `pid` is None if the run did not start the engine's process.
    """

    url: str
    pid: int | None
    version: int


class PublishedVersion(_Entry, frozen=True):
    """The weights of `version` are in the folder `path`.

    `win_rates`: win rates of the run's own policy by pool and member, by which servers of prioritised pools choose.
    """

    version: int
    path: str
    win_rates: dict[str, dict[int, float]] = {}


class TrainerTurn(_Entry, frozen=True):
    """The `number`-th turn on the devices that trainer and colocated servers share: the trainer's if `training`, else
    the colocated servers', which must have `version` or a newer one.
    """

    number: int
    training: bool
    version: int


class ServerMemory(_Entry, frozen=True):
    """State of the memory of the colocated server at `url`: `released`, or else unknown, since it is being released or
    resumed.
    """

    url: str
    released: bool


def worker_key(kind: str, index: int) -> str:
    """`WorkerAddress` of worker `index` of `kind` (`model_worker`, `rollout_worker`, ...)."""
    return f"{WORKERS}/{kind}/{index}"


def status_key(kind: str, index: int) -> str:
    """`WorkerStatus` of worker `index` of `kind`."""
    return f"{STATUSES}/{kind}/{index}"


def incarnation_key(kind: str, index: int) -> str:
    """Number of processes of worker `index` of `kind` that were replaced."""
    return f"{INCARNATIONS}/{kind}/{index}"


def killed_key(kind: str, index: int) -> str:
    """Number of processes of worker `index` of `kind` that were replaced when one was killed from outside last."""
    return f"{KILLED}/{kind}/{index}"


def puller_key(dp: int) -> str:
    """Address of the trajectory puller of data-parallel head `dp`."""
    return f"{PULLERS}/{dp}"


def gen_server_key(index: int) -> str:
    """`GenerationServerEntry` of generation server `index`."""
    return f"{GENERATION_SERVERS}/{index}"


def server_memory_key(index: int) -> str:
    """`ServerMemory` of colocated server `index`; absent while it has its memory for certain."""
    return f"{SERVER_MEMORY}/{index}"


def staging_server_key(index: int) -> str:
    """URL of staging server `index`."""
    return f"{STAGING_SERVERS}/{index}"


def staged_key(folder: str, host: str) -> str:
    """Location of `folder`, which does not change during a launch, on the host at this address."""
    return f"staged/{folder}/{host}"


def model_version_key(role: str) -> str:
    """`PublishedVersion` of `role`."""
    return f"model_version/{role}"


def index_of(key: str) -> int:
    """Return the index at the end of a worker's, puller's, pusher's or server's key.

    Raises:
        ValueError: the key's last component is not an index.
    """
    last = key.rpartition("/")[2]
    if not last.isdecimal():
        raise ValueError(f"name {key!r} ends in {last!r}, expected an index, as in 'workers/actor/0'")
    return int(last)


def url_host(host: str) -> str:
    """Return `host` as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
