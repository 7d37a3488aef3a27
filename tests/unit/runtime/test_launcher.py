"""Reactions of the launcher to the ends of its processes, which a back end without processes plays."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolveError, NameResolveUnavailable
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import METRICS_FILE, run_dir_of
from asyncrl.observe.display import Row
from asyncrl.runtime import launcher as launcher_module
from asyncrl.runtime.backends import LauncherBackend, WorkerHandle
from asyncrl.runtime.launcher import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Launcher
from asyncrl.runtime.plan import PROCESS_KINDS, ProcessKind, Restart, WorkerPlan
from asyncrl.runtime.run_log import BRAIN, WHOLE_RUN, count_restarts, notice
from asyncrl.runtime.settings import EXIT_LOST, EXIT_STATE_LOST
from asyncrl.runtime.supervisor import STOP_SIGNAL
from asyncrl.runtime.trials import memory_checkpoint as memory_checkpoint_module
from asyncrl.runtime.trials.claim import TrialClaim, TrialHeld, open_resolver
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint

LIMIT_S = 10.0
"""Longest time, in s, until a played run has ended."""


class Played(WorkerHandle):
    """A process that ends when the test says so, or when it is asked to."""

    def __init__(self, plan: WorkerPlan, stopped: list[str]) -> None:
        super().__init__(plan, "played", Path("its log"))
        self._code: int | None = None
        self._ended = asyncio.Event()
        self._stopped = stopped

    def end(self, code: int) -> None:
        if self._code is None:
            self._code = code
            self._ended.set()

    @property
    def exit_code(self) -> int | None:
        return self._code

    async def wait(self) -> None:
        await self._ended.wait()

    def terminate(self) -> None:
        if self._code is None:
            self._stopped.append(self.plan.name)
            self.end(0)

    def kill(self) -> None:
        self.end(-signal.SIGKILL)

    def last_lines(self) -> list[str]:
        return ["its last words"]


class Stage(LauncherBackend):
    """Starts played processes, and does `script[name]` with each as it starts."""

    def __init__(self, run_dir: Path, script: dict[str, Callable[[Played], None]]) -> None:
        super().__init__(run_dir)
        self.script = script
        self.started: list[str] = []
        self.incarnations: list[int] = []
        self.stopped: list[str] = []
        self.closed = False

    async def start(self, plan: WorkerPlan) -> WorkerHandle:
        self.started.append(plan.name)
        self.incarnations.append(plan.incarnation)
        worker = Played(plan, self.stopped)
        if plan.name in self.script:
            asyncio.get_running_loop().call_soon(self.script[plan.name], worker)
        return worker

    async def close(self) -> None:
        self.closed = True


class Notes:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def row(self, row: Row) -> None:
        raise AssertionError("no row is written here")

    def close(self) -> None:
        pass


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> dict[str, ProcessKind]:
    """The registry, with a leader, a client and a server; tests add to it."""
    for name in list(PROCESS_KINDS):
        monkeypatch.delitem(PROCESS_KINDS, name)
    for name, kind in (
        ("server", ProcessKind("nowhere:Server", serves=True)),
        ("client", ProcessKind("nowhere:Client")),
        ("leader", ProcessKind("nowhere:Leader", leads=True)),
    ):
        monkeypatch.setitem(PROCESS_KINDS, name, kind)
    return PROCESS_KINDS


Play = Callable[..., tuple[int, Stage, str]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: dict[str, ProcessKind]) -> Play:
    """`play(name=what)` runs a launcher whose processes do `what` as they start; gives exit code, stage and notes."""

    def play(restarts: int = 3, setting: str = "", **script: Callable[[Played], None]) -> tuple[int, Stage, str]:
        config = ExperimentConfig(fileroot=str(tmp_path))
        if setting:
            group, name, value = re.split("[.=]", setting)
            setattr(getattr(config, group), name, False if value == "false" else value)
        config.system.restarts_per_process = restarts
        (tmp_path / "memory").mkdir()
        monkeypatch.setattr(memory_checkpoint_module, "_MEMORY", tmp_path / "memory")
        stage, display = Stage(tmp_path, {f"{kind}/0": action for kind, action in script.items()}), Notes()
        monkeypatch.setattr(launcher_module, "backend_class", lambda name: lambda run_dir: stage)
        launcher = Launcher(config, display)
        launcher.prepare()
        code = launcher.run()
        assert stage.closed
        return code, stage, "\n".join(display.notes)

    return play


def ends(code: int) -> Callable[[Played], None]:
    return lambda worker: worker.end(code)


@pytest.mark.usefixtures("kinds")
def test_a_launch_shows_the_rows_of_its_own_steps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It continues from step 2 of three that an earlier launch has shown."""
    config = ExperimentConfig(fileroot=str(tmp_path))
    file = run_dir_of(config) / METRICS_FILE
    file.parent.mkdir(parents=True)
    write_rows(file, [(1, 0), (2, 0), (3, 0)])

    notice(run_dir_of(config), "WARNING: of the earlier launch")

    def train(leader: Played) -> None:
        write_rows(file, [(1, 0), (2, 0), (3, 1)])
        leader.end(0)

    shown: list[tuple[int, int]] = []
    display = Notes()
    monkeypatch.setattr(display, "row", lambda row: shown.append((row["step"], row["launch"])))
    stage = Stage(tmp_path, {"leader/0": train})
    monkeypatch.setattr(launcher_module, "backend_class", lambda name: lambda run_dir: stage)
    launcher = Launcher(config, display)
    launcher.prepare()
    assert launcher.run() == EXIT_OK
    assert shown == [(3, 1)]
    assert not any("of the earlier launch" in note for note in display.notes)


def test_a_notice_of_a_process_is_shown_once(play: Play, tmp_path: Path) -> None:
    def train(leader: Played) -> None:
        notice(run_dir_of(ExperimentConfig(fileroot=str(tmp_path))), "WARNING: nothing is learnt")
        leader.end(0)

    assert play(leader=train)[2].count("WARNING: nothing is learnt") == 1


def write_rows(file: Path, rows: Sequence[tuple[int, int]]) -> None:
    file.write_text("".join(json.dumps({"step": step, "launch": launch}) + "\n" for step, launch in rows))


def test_the_leaders_end_is_the_runs_and_clients_are_stopped_before_servers(play: Play) -> None:
    code, stage, _ = play(leader=ends(0))
    assert code == EXIT_OK
    assert stage.started == ["server/0", "client/0", "leader/0"]
    assert stage.stopped == ["client/0", "server/0"]


@pytest.mark.parametrize("code", [0, 3, -signal.SIGKILL])
def test_the_end_of_any_other_process_fails_the_run_after_the_leader_was_asked_to_save(play: Play, code: int) -> None:
    exit_code, stage, notes = play(client=ends(code))
    assert exit_code == EXIT_FAILED
    assert stage.stopped == ["leader/0", "server/0"]
    how = "was killed by signal SIGKILL" if code < 0 else f"exited with {code}"
    assert f"FAILED: client/0 (played) {how}; the end of its log:\n    its last words" in notes


def test_a_leader_that_fails_fails_the_run(play: Play) -> None:
    exit_code, stage, notes = play(leader=ends(1))
    assert exit_code == EXIT_FAILED
    assert "FAILED: leader/0" in notes
    assert stage.stopped == ["client/0", "server/0"]


def test_a_process_that_the_run_can_do_without_may_die(
    play: Play, kinds: dict[str, ProcessKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kinds, "dashboard", ProcessKind("nowhere:Dashboard", essential=False))
    leader: list[Played] = []

    def die_before_the_leader_ends(worker: Played) -> None:
        worker.end(1)
        leader[0].end(0)

    code, stage, notes = play(leader=leader.append, dashboard=die_before_the_leader_ends)
    assert code == EXIT_OK
    assert stage.started[-1] == "dashboard/0"
    assert "dashboard/0 (played) exited with 1; the run continues without it" in notes
    assert "FAILED" not in notes


@pytest.fixture
def helper(kinds: dict[str, ProcessKind], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind whose processes can be replaced, started before the leader."""
    leader = kinds.pop("leader")
    monkeypatch.setitem(kinds, "helper", ProcessKind("nowhere:Helper", restart=Restart.alone))
    kinds["leader"] = leader


@pytest.mark.usefixtures("helper")
def test_what_can_be_replaced_is_each_time_as_another_incarnation(play: Play, tmp_path: Path) -> None:
    leader: list[Played] = []
    helpers: list[Played] = []

    def die_twice(worker: Played) -> None:
        helpers.append(worker)
        if len(helpers) < 3:
            worker.end(-signal.SIGKILL)
        else:
            leader[0].end(0)

    code, stage, notes = play(leader=leader.append, helper=die_twice)
    assert code == EXIT_OK
    assert list(zip(stage.started, stage.incarnations, strict=True))[-2:] == [("helper/0", 1), ("helper/0", 2)]
    assert "helper/0 (played) was killed by signal SIGKILL; it is started again; its log: its log" in notes
    assert "FAILED" not in notes
    run_dir = run_dir_of(ExperimentConfig(fileroot=str(tmp_path)))
    assert count_restarts(run_dir) == {"helper/0": 2}
    with open_resolver(ExperimentConfig(), run_dir) as resolver:
        assert resolver.get_subtree(names.INCARNATIONS) == {names.incarnation_key("helper", 0): "2"}
        assert resolver.get_subtree(names.KILLED) == {names.killed_key("helper", 0): "2"}, "for those who ask why"


@pytest.mark.usefixtures("helper")
@pytest.mark.parametrize("restarts", [1, 2])
def test_beyond_its_budget_the_whole_run_is_started_again_once_then_it_fails(
    play: Play, tmp_path: Path, restarts: int
) -> None:
    code, stage, notes = play(restarts=restarts, helper=ends(-signal.SIGSEGV))
    assert code == EXIT_FAILED
    once = ["server/0", "client/0", "helper/0", "leader/0", *["helper/0"] * restarts]
    assert stage.started == [*once, *once]
    of_helper = range(1, restarts + 1)
    assert stage.incarnations == [0, 0, 0, 0, *of_helper, 1, 1, restarts + 1, 1, *(n + restarts + 1 for n in of_helper)]
    assert stage.stopped == ["leader/0", "client/0", "server/0"] * 2
    assert notes.count("and cannot be restarted alone: the whole run is started again") == 1
    assert notes.count("FAILED: helper/0 (played) was killed by signal SIGSEGV; the end of its log:") == 1
    counts = count_restarts(run_dir_of(ExperimentConfig(fileroot=str(tmp_path))))
    assert counts == {"helper/0": 2 * restarts, WHOLE_RUN: 1}


@pytest.mark.usefixtures("helper")
def test_a_whole_run_that_finds_no_room_in_memory_to_begin_again_ends_with_a_sentence(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def die(worker: Played) -> None:
        monkeypatch.setattr(MemoryCheckpoint, "_make", full)
        worker.end(-signal.SIGSEGV)

    code, stage, notes = play(restarts=1, helper=die)
    assert code == EXIT_FAILED
    assert stage.started == ["server/0", "client/0", "helper/0", "leader/0", "helper/0"]
    assert "FAILED: checkpoint.in_memory=true: " in notes
    assert "No space left on device; free " in notes


@pytest.mark.usefixtures("helper")
def test_a_launcher_that_lost_its_claim_puts_nothing_in_the_place_of_another_launchs_processes(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a long pause: its process ended because the other launch gave it up."""
    monkeypatch.setattr(TrialClaim, "is_lost", lambda claim: True)
    monkeypatch.setattr(Launcher, "_guard_claim", _looks_later)
    code, stage, _ = play(helper=ends(EXIT_LOST))
    assert code == EXIT_FAILED
    assert stage.started == ["server/0", "client/0", "helper/0", "leader/0"]


@pytest.mark.usefixtures("helper")
def test_a_launcher_that_finds_the_trial_taken_as_it_replaces_a_process_stops_all_and_says_so_once(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: object) -> None:
        monkeypatch.setattr(TrialClaim, "is_lost", lambda claim: True)
        raise TrialHeld("another took the trial over")

    monkeypatch.setattr(launcher_module.Trial, "fence", taken)
    code, stage, notes = play(helper=ends(-signal.SIGKILL))
    assert code == EXIT_FAILED
    assert stage.started == ["server/0", "client/0", "helper/0", "leader/0"]
    assert stage.stopped == ["client/0", "leader/0", "server/0"]
    assert notes.count("FAILED") == notes.count("FAILED: another took the trial over") == 1


@pytest.mark.usefixtures("helper")
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            NameResolveUnavailable("etcd does not answer"),
            "etcd does not answer; the run ends, as system.name_resolve_timeout_s=60",
        ),
        (NameResolveError("etcd refuses access"), "etcd refuses access"),
    ],
)
def test_a_death_that_name_resolution_cannot_be_told_of_ends_the_run_with_a_sentence_once_the_leader_saved(
    play: Play, monkeypatch: pytest.MonkeyPatch, error: NameResolveError, sentence: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(launcher_module.Trial, "fence", fail)
    code, stage, notes = play(helper=ends(-signal.SIGKILL))
    assert code == EXIT_FAILED
    assert stage.stopped == ["leader/0", "client/0", "server/0"]
    assert f"FAILED: {sentence}" in notes


@pytest.mark.usefixtures("helper")
def test_an_outage_while_a_restart_is_watched_is_shown_and_does_not_end_the_run(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader: list[Played] = []
    helpers: list[Played] = []
    show = Notes.note

    def note(display: Notes, text: str) -> None:
        show(display, text)
        if "cannot see when it is ready" in text:
            leader[0].end(0)

    def die_once(worker: Played) -> None:
        helpers.append(worker)
        if len(helpers) == 1:
            worker.end(-signal.SIGKILL)
        else:
            asyncio.get_running_loop().call_later(LIMIT_S, leader[0].end, 0)

    def away(*_: object) -> None:
        raise NameResolveUnavailable("etcd does not answer")

    monkeypatch.setattr(Notes, "note", note)
    monkeypatch.setattr(launcher_module, "open_resolver", away)
    code, _, notes = play(leader=leader.append, helper=die_once)
    assert code == EXIT_OK
    assert (
        "helper/0 was restarted; the launcher cannot see when it is ready: etcd does not answer" in notes.splitlines()
    )


@pytest.mark.usefixtures("helper")
def test_a_restarted_process_that_fails_is_not_reported_as_ready(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader: list[Played] = []
    helpers: list[Played] = []
    config = ExperimentConfig(fileroot=str(tmp_path))
    monkeypatch.setattr(launcher_module, "LOOK_S", 0.01)

    def fail_after_a_restart(worker: Played) -> None:
        helpers.append(worker)
        if len(helpers) == 1:
            worker.end(-signal.SIGKILL)
            return
        status = names.WorkerStatus("failed", os.getpid(), "no memory", incarnation=1)
        with open_resolver(config, run_dir_of(config)) as resolver:
            resolver.add(names.status_key("helper", 0), status.encode())
        asyncio.get_running_loop().call_later(0.2, worker.end, 1)

    code, _, notes = play(leader=leader.append, helper=fail_after_a_restart)
    assert code == EXIT_FAILED
    assert "went on" not in notes


async def _looks_later(launcher: Launcher) -> None:
    await asyncio.Event().wait()


@pytest.mark.usefixtures("helper")
def test_without_a_budget_nothing_is_started_again(play: Play) -> None:
    code, stage, notes = play(restarts=0, helper=ends(-signal.SIGKILL))
    assert (code, stage.started.count("helper/0")) == (EXIT_FAILED, 1)
    assert "FAILED: helper/0" in notes


@pytest.mark.usefixtures("helper")
@pytest.mark.parametrize("exit_code", [0, 1])
def test_what_says_that_it_cannot_go_on_is_not_started_again(play: Play, exit_code: int) -> None:
    code, stage, notes = play(helper=ends(exit_code))
    assert (code, stage.started.count("helper/0")) == (EXIT_FAILED, 1)
    assert f"FAILED: helper/0 (played) exited with {exit_code}" in notes


def test_a_replaceable_process_that_the_run_can_do_without_never_ends_it(
    play: Play, kinds: dict[str, ProcessKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    replaceable = ProcessKind("nowhere:Panel", essential=False, restart=Restart.alone)
    monkeypatch.setitem(kinds, "panel", replaceable)
    leader: list[Played] = []
    panels: list[Played] = []

    def die_every_time(worker: Played) -> None:
        panels.append(worker)
        worker.end(-signal.SIGKILL)
        if len(panels) == 2:
            leader[0].end(0)

    code, stage, notes = play(restarts=1, leader=leader.append, panel=die_every_time)
    assert (code, stage.started.count("panel/0")) == (EXIT_OK, 2)
    assert "FAILED" not in notes


@pytest.fixture
def brain(kinds: dict[str, ProcessKind], monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader and a rank, which begin again together."""
    kinds.pop("leader")
    monkeypatch.setitem(kinds, "rank", ProcessKind("nowhere:Rank", restart=Restart.together))
    leader = ProcessKind("nowhere:Leader", leads=True, restart=Restart.together)
    monkeypatch.setitem(kinds, "leader", leader)


ONCE = ["server/0", "client/0", "rank/0", "leader/0"]


@pytest.mark.usefixtures("brain")
@pytest.mark.parametrize("later_s", [None, 0.0, 0.3])
def test_the_brain_begins_again_together_and_the_others_stay(play: Play, tmp_path: Path, later_s: float | None) -> None:
    """Also where the leader gives up, as the rank is gone, and is heard of first."""
    ranks: list[Played] = []

    def lead(worker: Played) -> None:
        if len(ranks) == 2:
            worker.end(0)
            return
        if later_s is not None:
            worker.end(1)
        asyncio.get_running_loop().call_later(later_s or 0.0, ranks[0].end, -signal.SIGKILL)

    code, stage, notes = play(leader=lead, rank=ranks.append)
    assert code == EXIT_OK
    assert stage.started == [*ONCE, "rank/0", "leader/0"]
    assert stage.incarnations[-2:] == [1, 1]
    assert stage.stopped == ["client/0", "rank/0", "server/0"]
    assert "SIGKILL; it is started again with the whole brain, which resumes from the last step" in notes
    assert "FAILED" not in notes
    assert count_restarts(run_dir_of(ExperimentConfig(fileroot=str(tmp_path)))) == {BRAIN: 1}


@pytest.mark.usefixtures("brain")
def test_only_an_end_that_may_follow_another_is_held_until_its_cause_is_known(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(*_: object) -> None:
        raise AssertionError("a restart is late by this wait")

    monkeypatch.setattr(launcher_module.RunProcesses, "await_cause", held)
    leaders: list[Played] = []

    def lead(worker: Played) -> None:
        leaders.append(worker)
        worker.end(-signal.SIGKILL if len(leaders) == 1 else 0)

    assert play(leader=lead)[0] == EXIT_OK


@pytest.mark.usefixtures("brain", "helper")
@pytest.mark.parametrize("dies", ["rank", "helper"])
def test_the_addresses_of_a_dead_brain_are_removed_and_those_of_a_living_one_stay(
    play: Play, tmp_path: Path, dies: str
) -> None:
    config = ExperimentConfig(fileroot=str(tmp_path))
    started: dict[str, Played] = {}
    left: list[bool] = []

    def lead(worker: Played) -> None:
        started["leader"] = worker
        if len(left) == 0:
            with open_resolver(config, run_dir_of(config)) as resolver:
                resolver.add(names.MANAGER_KEY, "there")
            started[dies].end(-signal.SIGKILL)
            left.append(True)
        elif dies == "rank":
            look()

    def begin(worker: Played) -> None:
        if started.setdefault(worker.plan.kind, worker) is not worker and dies == "helper":
            look()

    def look() -> None:
        with open_resolver(config, run_dir_of(config)) as resolver:
            left[0] = bool(resolver.get_subtree(names.MANAGER_KEY))
        started["leader"].end(0)

    code, stage, _ = play(leader=lead, rank=begin, helper=begin)
    assert (code, stage.started.count(f"{dies}/0")) == (EXIT_OK, 2)
    assert left == [dies == "helper"]


@pytest.mark.usefixtures("brain")
def test_a_leaders_death_takes_the_rank_along(play: Play, tmp_path: Path) -> None:
    leaders: list[Played] = []

    def lead(worker: Played) -> None:
        leaders.append(worker)
        worker.end(-signal.SIGKILL if len(leaders) == 1 else 0)

    code, stage, notes = play(leader=lead)
    assert code == EXIT_OK
    assert stage.started == [*ONCE, "rank/0", "leader/0"]
    assert stage.stopped == ["client/0", "rank/0", "server/0"]
    assert "leader/0 (played) was killed by signal SIGKILL; it is started again with the whole brain" in notes
    assert "FAILED" not in notes
    assert count_restarts(run_dir_of(ExperimentConfig(fileroot=str(tmp_path)))) == {BRAIN: 1}


@pytest.mark.usefixtures("brain")
def test_a_leader_that_finds_the_last_step_lost_takes_the_whole_run_back_once(play: Play) -> None:
    code, stage, notes = play(restarts=1, leader=ends(EXIT_STATE_LOST))
    assert code == EXIT_FAILED
    assert stage.started == [*ONCE, *ONCE]
    assert "leader/0 (played) found that the last step is lost, and cannot be restarted alone" in notes
    assert "FAILED: leader/0 (played) found that the last step is lost" in notes


@pytest.mark.usefixtures("brain")
@pytest.mark.parametrize("setting", ["checkpoint.in_memory=false", "samples.only=true"])
def test_where_no_step_is_kept_a_leaders_death_takes_the_whole_run_back(play: Play, setting: str) -> None:
    leaders: list[Played] = []

    def lead(worker: Played) -> None:
        leaders.append(worker)
        worker.end(-signal.SIGKILL if len(leaders) == 1 else 0)

    code, stage, notes = play(setting=setting, leader=lead)
    assert code == EXIT_OK
    assert stage.started == [*ONCE, *ONCE]
    assert "the whole run is started again" in notes


@pytest.mark.usefixtures("brain")
@pytest.mark.parametrize("missing", ["the folder", "the version"])
def test_where_the_last_step_is_lost_the_whole_run_goes_back_to_its_checkpoint(
    play: Play, tmp_path: Path, missing: str
) -> None:
    ranks: list[Played] = []
    config = ExperimentConfig(fileroot=str(tmp_path))

    def lead(worker: Played) -> None:
        if len(ranks) == 2:
            worker.end(0)
            return
        if missing == "the folder":
            shutil.rmtree(MemoryCheckpoint(run_dir_of(config)).folder)
        else:
            with open_resolver(config, run_dir_of(config)) as resolver:
                resolver.add(names.model_version_key(names.ACTOR), names.PublishedVersion(1, "there").encode())
        ranks[0].end(-signal.SIGKILL)

    code, stage, notes = play(leader=lead, rank=ranks.append)
    assert code == EXIT_OK
    assert stage.started == [*ONCE, *ONCE]
    assert "the whole run is started again" in notes
    assert count_restarts(run_dir_of(config)) == {WHOLE_RUN: 1}


@pytest.mark.usefixtures("brain")
def test_a_rank_that_gives_up_by_itself_ends_the_run(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "STOP_S", 0.05)
    code, stage, notes = play(rank=ends(1))
    assert (code, stage.started) == (EXIT_FAILED, ONCE)
    assert "FAILED: rank/0 (played) exited with 1" in notes


def interrupts(times: int) -> Callable[[Played], None]:
    def interrupt(worker: Played) -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    return interrupt


def test_an_interrupt_asks_the_leader_first(play: Play) -> None:
    code, stage, notes = play(leader=interrupts(1))
    assert code == EXIT_INTERRUPTED
    assert stage.stopped == ["leader/0", "client/0", "server/0"]
    assert "stopping after a checkpoint" in notes


def test_an_interrupt_that_kills_a_leader_that_has_just_begun_is_no_failure(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its interpreter has not got so far as to take the request: as the run starts, or after its death."""
    monkeypatch.setattr(Played, "terminate", lambda worker: worker.end(-STOP_SIGNAL))
    code, _, notes = play(leader=interrupts(1))
    assert code == EXIT_INTERRUPTED
    assert "FAILED" not in notes
    assert "leader/0 had just begun, so no checkpoint was written" in notes


def test_a_process_is_not_replaced_once_the_run_is_to_stop(
    play: Play, kinds: dict[str, ProcessKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    replaceable = ProcessKind("nowhere:Helper", essential=False, restart=Restart.alone)
    monkeypatch.setitem(kinds, "helper", replaceable)
    helpers: list[Played] = []

    def helper_dies_first(worker: Played) -> None:
        helpers[0].end(1)
        worker.end(0)

    monkeypatch.setattr(Played, "terminate", helper_dies_first)
    code, stage, notes = play(helper=helpers.append, leader=interrupts(1))
    assert code == EXIT_INTERRUPTED
    assert stage.started.count("helper/0") == 1
    assert "helper/0 (played) exited with 1; the run continues without it" in notes


@pytest.fixture
def _deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process ends because it was asked to."""
    monkeypatch.setattr(Played, "terminate", lambda worker: None)
    monkeypatch.setattr(launcher_module, "STOP_S", 0.0)


@pytest.mark.usefixtures("_deaf")
def test_a_checkpoint_that_takes_too_long_is_not_waited_for(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "SAVE_LIMIT_S", 0.0)
    code, _, notes = play(leader=interrupts(1))
    assert code == EXIT_INTERRUPTED
    assert "leader/0 did not stop within" in notes


def test_sigterm_asks_the_leader_however_often_it_comes(play: Play) -> None:
    """A batch system sends it to the launcher, and so does the script around it."""

    def terminates(worker: Played) -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)

    code, stage, notes = play(leader=terminates)
    assert code == EXIT_INTERRUPTED
    assert stage.stopped == ["leader/0", "client/0", "server/0"]
    assert notes.count("stopping after a checkpoint") == 1


def test_a_server_that_a_batch_system_ended_keeps_no_leader_from_saving(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: list[Played] = []

    def server_dies_first(worker: Played) -> None:
        servers[0].end(1)
        worker.end(0)

    monkeypatch.setattr(Played, "terminate", server_dies_first)
    code, _, notes = play(server=servers.append, leader=interrupts(1))
    assert code == EXIT_INTERRUPTED
    assert "FAILED" not in notes


@pytest.mark.usefixtures("_deaf")
def test_two_interrupts_kill_at_once(play: Play) -> None:
    code, _, notes = play(leader=interrupts(2))
    assert code == EXIT_INTERRUPTED
    assert "did not stop" not in notes
