"""What the doctor says of a run's health, and of one that stands still or has died."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from asyncrl.comm import names
from asyncrl.comm.files import FileLock
from asyncrl.launch.commands.doctor import main, show
from asyncrl.observe.doctor import Finding, Level, examine
from asyncrl.observe.doctor.health import RUBRIC_FAILED
from asyncrl.observe.history import History
from asyncrl.observe.observer import SLEEPS
from asyncrl.plugins.agents import verifiers_host
from tests.unit.observe.doctor.virtual_run import Knobs, VirtualRun


@pytest.fixture
def run(tmp_path: Path) -> Path:
    VirtualRun(Knobs(speed=20_000, steps=30), tmp_path / "run").play()
    return tmp_path / "run"


def change_rows(run: Path, change: Any) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        change(number, row)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write(file: Path, *lines: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def train_steps(run: Path) -> float:
    """Let the MasterWorker tell when it trained each step, as in a real run; return when the last one was complete."""
    for number, step in History(run).steps.items():
        span = {"span": "train", "begin": step.at - 0.05, "end": step.at, "step": number}
        append(run / "observed" / "master_worker-0.jsonl", span)
    return step.at


def problems(run: Path) -> dict[str, str]:
    return {each.kind: each.line() for each in examine(History(run)).findings if each.level is Level.problem}


def hold(run: Path) -> FileLock:
    """Hold the run as its launcher does."""
    holder = names.TrialHolder("x", socket.gethostname(), "m", os.getpid(), 1, "now", str(run))
    (run / "lock").write_text(holder.encode())
    lock = FileLock(run / "lock")
    assert lock.take()
    (run / "summary.json").unlink()
    return lock


def test_a_healthy_run_has_no_problem(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(run) == {}
    assert main([str(run)], "asyncrl") == 0
    assert "steps" in capsys.readouterr().out


def test_stages_tell_of_what_is_wrong_with_none_of_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Publishing, weight updates and ages: what a user may fear, with its figure."""
    main([str(run)], "asyncrl")
    reported = " ".join(capsys.readouterr().out.split())
    assert "training 0.3" in reported
    assert "of the time in weight updates" in reported
    assert re.search(r"age of tokens █+ +\d+ % at most \d versions, η = 2", reported)


def test_rewards_that_are_all_the_same_teach_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_rows(run, lambda _, row: row.update({"reward/std": 0.0, "reward/frac_zero_std": 1.0, "reward/mean": 1.0}))
    assert "the rewards are all the same (mean 1)" in problems(run)["nothing-learnt"]
    assert main([str(run)], "asyncrl") == 1
    assert "troubleshooting.md#nothing-learnt" in capsys.readouterr().out


def test_a_function_of_a_rubric_that_raises_is_told_by_its_name(run: Path) -> None:
    change_rows(run, lambda _, row: row.update({"agent/rubric_failed/judge": 0.25, "agent/rubric_failed/rare": 0.01}))
    assert f"agent/{verifiers_host.RUBRIC_FAILED}" == RUBRIC_FAILED
    assert "judge raised in 25% of the last episodes, where it counts as 0" in problems(run)["rubric-fails"]


@pytest.mark.parametrize("waits_for", ["thread", "process", "agent", "env"])
def test_waiting_for_a_place_for_user_code_is_not_taken_for_slow_generation(waits_for: str, tmp_path: Path) -> None:
    VirtualRun(Knobs(reward_s=3.0, steps=20), tmp_path / "run").play()

    def waits(_: int, row: dict[str, Any]) -> None:
        row[f"rollout/{waits_for}_wait_s"] = row.pop("rollout/reward_s") - 0.1

    change_rows(tmp_path / "run", waits)
    first = examine(History(tmp_path / "run")).findings[0]
    assert first.kind == "blocked-user-code"
    assert "waiting for a thread or process" in first.sentence


def test_an_entropy_that_collapses_is_told(run: Path) -> None:
    change_rows(run, lambda number, row: row.update({"entropy": 0.9 * 0.7**number}))
    assert "fell from" in problems(run)["entropy-collapses"]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("stale", "stale-drops"),
        ("failed: reward my.py:score", "rewards-that-always-fail"),
        ("filter: zero_variance", "filters-drop-nearly-all"),
    ],
)
def test_drops_are_told_by_their_reason(run: Path, reason: str, kind: str) -> None:
    file = run / "ledger" / "000001.jsonl"
    lines, dropped = [], 0
    for raw in file.read_text().splitlines():
        lines.append(raw)
        if '"kind":"admitted"' in raw:
            rollout = json.loads(raw)["rollout"]
            for copy in range(20):
                lost = raw.replace(rollout, f"{rollout}-{copy}")
                lines += [lost, json.dumps({"kind": "dropped", "rollout": f"{rollout}-{copy}", "reason": reason,
                                            "prompt": "returned", "at": json.loads(raw)["at"]})]  # fmt: skip
                dropped += 1
    file.write_text("\n".join(lines) + "\n")
    assert kind in problems(run)


def test_failures_are_told_of_a_run_that_came_to_no_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    VirtualRun(Knobs(steps=0), run).play()
    admitted = {"kind": "admitted", "prompt": "e0-1", "order": 1, "attempt": 0, "worker": "w", "version": 0, "at": 1.0}
    dropped = {"kind": "dropped", "reason": "failed: reward my.py:score", "prompt": "returned", "at": 2.0}
    with (run / "ledger" / "000001.jsonl").open("a") as file:
        for number in range(20):
            for line in (admitted, dropped):
                file.write(json.dumps(line | {"rollout": f"r{number}"}) + "\n")
    assert "20 of 20 rollouts since step 1 failed" in problems(run)["rewards-that-always-fail"]


def memory_of(run: Path, process: str, rss: Callable[[int], int], seconds: int = 2000) -> dict[str, str]:
    """Problems of a run in which a process has `rss(second)` bytes; its host has 8 GiB left."""
    at = range(0, seconds, 2)
    about = {"pid": 7, "stage": "plays", "since": 0.0, "host_free": 8 << 30}
    write(run / "observed" / f"{process}-0.jsonl", *[{"at": float(n), "rss": rss(n), **about} for n in at])
    return problems(run)


GIB = 1 << 30


def test_memory_that_grows_towards_its_hosts_end_is_told(run: Path) -> None:
    reported = memory_of(run, "rollout_worker", lambda second: GIB + second * (GIB // 128))
    assert "rollout_worker/0 grew" in reported["memory-grows"]
    assert "Look for what your agent, environment, reward or tools keep." in reported["memory-grows"]


@pytest.mark.parametrize("process", ["generation_server", "model_worker", "rollout_worker"])
@pytest.mark.parametrize(
    "rss",
    [
        lambda second: GIB + min(second, 500) * GIB // 10,
        lambda second: GIB + int(8 * GIB * (1 - 2 ** (-second / 300))),
        lambda second: GIB + (second % 600) * GIB // 100,
    ],
    ids=["step", "saturating", "sawtooth"],
)
def test_caches_that_fill_are_no_growth(run: Path, process: str, rss: Callable[[int], int]) -> None:
    assert memory_of(run, process, rss) == {}


def test_the_first_minutes_and_steps_of_a_run_say_nothing_about_its_memory(run: Path) -> None:
    assert memory_of(run, "generation_server", lambda second: GIB + second * (GIB // 64), seconds=900) == {}
    rows = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(rows[:3]) + "\n")
    assert "memory-grows" not in memory_of(run, "generation_server", lambda second: GIB + second * (GIB // 128))


def test_a_run_that_ended_without_a_summary_says_who_did_what(run: Path) -> None:
    (run / "summary.json").unlink()
    write(run / "restarts.jsonl", {"restarted": "model_worker/0", "reason": "was killed by signal SIGKILL"})
    reported = problems(run)["died"]
    assert "after step 30" in reported
    assert "model_worker/0, which was killed by signal SIGKILL" in reported


LATER = 1e12
SHORT = "out of memory: model_worker/1 on cuda:0 in call 'actor_train' of step 31: it tried to allocate 2 GiB"
LESS = "to need less memory, in this order: trainer.offload=true; trainer.parallel over more GPUs (now d1)"


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(
    ("process", "short", "at", "kind", "sentence"),
    [
        ("model_worker/1", SHORT, LATER - 3, "out-of-memory", "out of memory: model_worker/1 on cuda:0 in call"),
        ("generation_server/0", "CUDA out of memory. X", LATER, "out-of-memory", "generation_server/0: CUDA out of me"),
        (
            "generation_server/0",
            "CUDA out of memory. X",
            LATER - 900,
            None,
            "master_worker/0 failed: ValueError: boom.",
        ),
        ("generation_server/0", None, 0, None, "master_worker/0 failed: ValueError: boom."),
    ],
    ids=["rank", "server", "long before", "another cause"],
)
def test_a_process_that_failed_is_told_with_its_reason(
    process: str, short: str | None, at: float, kind: str | None, sentence: str, stopped: bool, run: Path
) -> None:
    """Whether the MasterWorker could still write a summary or not."""
    if stopped:
        (run / "summary.json").write_text(json.dumps({"steps": 3}))
    else:
        (run / "summary.json").unlink()
    about = {"at": LATER, "since": LATER, "pid": 1, "stage": "serves", "ended": True}
    shortage = {} if short is None else {"shortage": {"at": at, "what": short, "advice": LESS}}
    for name, more in ((process, shortage), ("master_worker/0", {"failed": "ValueError: boom\nmore"})):
        append(run / "observed" / f"{name.replace('/', '-')}.jsonl", about | more)
    reported = problems(run)
    assert sentence in reported[kind or ("failed" if stopped else "died")]
    if kind:
        assert "To need less memory, in this order: trainer.offload=true" in reported[kind]


def test_a_run_without_a_step_says_which_process_is_not_ready(tmp_path: Path) -> None:
    run = tmp_path / "run"
    VirtualRun(Knobs(steps=0), run)._write()
    (run / "config.yaml").write_text('{"total_train_steps": 5}')
    lock, now = hold(run), time.time()
    write(run / "observed" / "generation_server-0.jsonl",
          {"at": now, "pid": 1, "stage": "loads the model", "activity": "works", "since": now - 42})  # fmt: skip
    write(run / "observed" / "master_worker-0.jsonl",
          {"at": now, "pid": 2, "stage": "waits for 'x'", "activity": "blocked", "since": now - 40})  # fmt: skip
    found = examine(History(run)).findings[0]
    lock.close()
    assert found.kind == "no-step-yet"
    assert "generation_server/0 loads the model since 42 s" in found.sentence
    assert found.advice == "The others wait for generation_server/0; see its log."


def test_a_run_without_a_step_says_which_server_has_never_been_heard_of(tmp_path: Path) -> None:
    """As one that hangs before its first line, while all others are at work."""
    run = tmp_path / "run"
    VirtualRun(Knobs(steps=0), run)._write()
    (run / "config.yaml").write_text(
        '{"total_train_steps": 5, "generation": {"servers": 2}, "rollout": {"workers": 1}}'
    )
    for file in (run / "observed").glob("*"):
        file.unlink()
    lock, now = hold(run), time.time()
    for name, stage in (("generation_server-0", "serves"), ("rollout_worker-0", "plays"), ("model_worker-0", "ready")):
        write(run / "observed" / f"{name}.jsonl", {"at": now, "pid": 1, "stage": stage, "since": now - 40})
    found = examine(History(run)).findings[0]
    lock.close()
    assert found.sentence.endswith("Silent: generation_server/1.")
    assert found.advice == "The others wait for generation_server/1; see its log."


@pytest.mark.parametrize(("on_a_core", "seconds", "named"), [(0.1, 90, True), (0.9, 90, False), (0.1, 40, False)])
def test_a_run_that_has_no_cores_before_its_first_step_is_told_so(
    tmp_path: Path, on_a_core: float, seconds: int, named: bool
) -> None:
    """A core for a small share of the time, for long; not for most of it, nor while processes just start."""
    run = tmp_path / "run"
    VirtualRun(Knobs(steps=0), run)._write()
    (run / "config.yaml").write_text('{"total_train_steps": 5}')
    for file in (run / "observed").glob("*"):
        file.unlink()
    lock, now = hold(run), time.time()
    for pid, name in enumerate(("generation_server-0", "rollout_worker-0", "model_worker-0")):
        write(
            run / "observed" / f"{name}.jsonl",
            *(
                {
                    "at": now - seconds + at, "pid": pid, "since": now - seconds,
                    "stage": "loads the model", "activity": "works",
                    "cpu_s": on_a_core * at, "no_core_s": (1 - on_a_core) * at,
                }
                for at in range(0, seconds + 1, 2)
            ),
        )  # fmt: skip
    found = examine(History(run))
    lock.close()
    assert ("no-cpu" in {each.kind for each in found.findings}) is named
    if named:
        assert found.findings[0].sentence == (
            "in the last 60 s the run's threads had a processor 10 % of the time in which they could run."
        )


def test_a_run_whose_processes_have_not_told_anything_yet_is_starting(tmp_path: Path) -> None:
    run = tmp_path / "run"
    VirtualRun(Knobs(steps=0), run)._write()
    (run / "config.yaml").write_text('{"total_train_steps": 5}')
    for file in (run / "observed").glob("*"):
        file.unlink()
    lock = hold(run)
    (found,) = examine(History(run)).findings
    lock.close()
    assert found.sentence == "the processes are starting."


def test_a_run_that_is_started_again_hours_later_is_starting_and_does_not_stand_still(run: Path) -> None:
    lock, again = hold(run), train_steps(run) + 7200
    line = {"at": again, "pid": 9, "stage": "starts processes", "activity": "works", "since": again}
    write(run / "observed" / "launcher-0.jsonl", line)
    write(
        run / "observed" / "model_worker-0.jsonl",
        line | {"stage": "loads the models", "activity": "works", "since": again - 5},
    )
    reported = {each.kind: each for each in examine(History(run)).findings}
    lock.close()
    assert "stalled" not in reported
    assert reported["no-step-yet"].sentence.startswith(
        "the run continues after step 30: model_worker/0 loads the models"
    )


def test_a_run_that_stands_still_names_the_silent_process(run: Path) -> None:
    lock, ended = hold(run), train_steps(run)
    stands = ended + 500
    with (run / "ledger" / "000001.jsonl").open() as lines:
        admitted = json.loads(next(line for line in lines if '"kind":"admitted"' in line))
    (run / "ledger" / "000001.jsonl").open("a").write(
        "".join(json.dumps(admitted | {"rollout": name, "prompt": prompt, "at": ended + after}) + "\n"
                for name, prompt, after in (("new", "e0-7", -90), ("straggler", "e0-5", -100)))
    )  # fmt: skip
    write(run / "observed" / "model_worker-0.jsonl",
          {"at": stands - 400, "pid": 1, "stage": "computes actor_train", "activity": "works",
           "since": stands - 450})  # fmt: skip
    trains = {"at": stands, "pid": 2, "stage": "trains step 31", "activity": "works", "since": stands - 450}
    append(run / "observed" / "master_worker-0.jsonl", trains)
    reported = problems(run)["stalled"]
    line = {"pid": 3, "stage": "plays", "since": ended}
    answers = [line | {"at": stands - 20, "answers_total": 7}, line | {"at": stands, "answers_total": 9}]
    (run / "observed" / "rollout_worker-0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in answers))
    later = problems(run)
    lock.close()
    assert "stalled" not in later, "answers end: the step is only long"
    assert "no step since 500 s, after step 30" in reported
    assert reported.endswith("py-spy dump shows where it is.")
    assert "model_worker/0" in reported.partition("Silent: ")[2]
    assert "master_worker/0 trains step 31 since 450 s" in reported
    assert "The rollout of prompt e0-5 on" in reported
    assert "has been under way for 600 s" in reported


def test_a_run_that_waits_for_one_rollout_says_what_ends_it(run: Path) -> None:
    lock, stands = hold(run), train_steps(run) + 500
    for file in (run / "observed").glob("*.jsonl"):
        append(file, {"at": stands, "pid": 1, "stage": "plays", "since": stands - 600})
    found = examine(History(run)).findings[0]
    lock.close()
    assert found.kind == "stalled"
    assert "Silent" not in found.sentence
    assert found.advice.startswith("Look at the log of rollout_worker/0; rollout.rollout_timeout_s ends rollouts")


def test_a_slow_server_of_two_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    VirtualRun(replace(Knobs(), speed=1000), run).play()
    file = run / "observed" / "generation_server-0.jsonl"
    slow = [json.loads(line) for line in file.read_text().splitlines()]
    for line in slow:
        line["generated_total"] /= 5
    write(run / "observed" / "generation_server-1.jsonl", *slow)
    kinds = {each.kind: each for each in examine(History(run)).findings}
    assert "generation_server/1 decodes" in kinds["slow-server"].sentence


def policy_servers(run: Path, change: Any, count: int = 1) -> None:
    """Give the run servers of a policy `judge`, whose lines are those of the run's own server, changed."""
    config = json.loads((run / "config.yaml").read_text())
    config["policies"] = [{"name": "judge", "servers": count}]
    (run / "config.yaml").write_text(json.dumps(config))
    own = [json.loads(line) for line in (run / "observed" / "generation_server-0.jsonl").read_text().splitlines()]
    for index in range(count):
        write(run / "observed" / f"policy_server-{index}.jsonl", *[line | change(index, line) for line in own])


def test_samples_that_queue_at_another_policy_are_told_with_its_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    VirtualRun(replace(Knobs(), speed=1000), run).play()
    policy_servers(run, lambda _, line: {"queued": 90, "running": 8, "max_running": 8})
    kinds = {each.kind: each for each in examine(History(run)).findings}
    assert "90 samples wait in the servers of policy judge while 8 of at most 8 run" in (
        kinds["server-batch-too-small"].sentence
    )
    assert "the servers of policy judge decode" in kinds["slow-generation"].sentence
    assert kinds["slow-generation"].advice.startswith("More of the servers of policy judge")


def changed_run(run: Path, server: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> dict[str, Finding]:
    """Findings of a virtual run whose server wrote other lines, and that has other settings."""
    VirtualRun(replace(Knobs(), speed=1000), run).play()
    config = json.loads((run / "config.yaml").read_text())
    for name, value in (settings or {}).items():
        group, _, leaf = name.rpartition(".")
        (config.setdefault(group, {}) if group else config)[leaf] = value
    (run / "config.yaml").write_text(json.dumps(config))
    file = run / "observed" / "generation_server-0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    write(file, *[line | {key: value * n if key.endswith("_s") else value for key, value in server.items()}
                  for n, line in enumerate(lines)])  # fmt: skip
    return {each.kind: each for each in examine(History(run)).findings}


@pytest.mark.parametrize(("queued", "running", "most"), [(60, 161, 256), (90, 166, 256), (30, 90, 128)])
def test_samples_that_wait_while_the_batch_has_room_are_no_limit_of_it(
    tmp_path: Path, queued: int, running: int, most: int
) -> None:
    found = changed_run(tmp_path / "run", {"queued": queued, "running": running, "max_running": most, "kv_share": 0.2})
    assert not {"server-batch-too-small", "kv-cache-too-small"} & found.keys()


@pytest.mark.parametrize(("queued", "running", "most"), [(161, 161, 256), (200, 250, 256), (9, 8, 8)])
def test_an_advised_batch_is_larger_than_the_one_that_is_set(
    tmp_path: Path, queued: int, running: int, most: int
) -> None:
    found = changed_run(tmp_path / "run", {"queued": queued, "running": running, "max_running": most, "kv_share": 0.2})
    advised = int(found["server-batch-too-small"].advice.removesuffix(".").partition("=")[2])
    assert advised > most


def test_more_servers_are_not_advised_where_the_cores_are_all_taken(tmp_path: Path) -> None:
    free = changed_run(tmp_path / "free", {"cpu_s": 2.0, "no_core_s": 0.0})["slow-generation"]
    assert free.advice.startswith("More generation servers")
    taken = changed_run(tmp_path / "taken", {"cpu_s": 2.0, "no_core_s": 2.0})["slow-generation"]
    assert "More generation servers" not in taken.advice
    assert "more cores" in taken.advice
    assert "had no core 50 %" in taken.sentence
    assert taken.gain == ""


def test_servers_are_compared_with_others_of_their_policy(tmp_path: Path) -> None:
    run = tmp_path / "run"
    VirtualRun(replace(Knobs(), speed=1000), run).play()
    policy_servers(run, lambda _, line: {"generated_total": line["generated_total"] / 10}, 2)
    assert "slow-server" not in [each.kind for each in examine(History(run)).findings], "a larger model is no fault"
    policy_servers(run, lambda index, line: {"generated_total": line["generated_total"] / (10 + 40 * index)}, 2)
    kinds = {each.kind: each for each in examine(History(run)).findings}
    assert "policy_server/1 decodes" in kinds["slow-server"].sentence
    policy_servers(run, lambda index, line: {"stage": SLEEPS if index else line["stage"]}, 2)
    assert "slow-server" not in [each.kind for each in examine(History(run)).findings], (
        "a colocated server that sleeps is no fault"
    )
    loading = {"stage": "loads the model", "activity": "works"}
    policy_servers(run, lambda index, line: loading if index else {}, 2)
    kinds = {each.kind: each for each in examine(History(run)).findings}
    assert "policy_server/1 loads the model, and the others serve" in kinds["slow-server"].sentence


def test_a_plan_for_a_run_that_the_formula_does_not_know_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy_servers(run, lambda _, line: {})
    assert main([str(run), "--plan", "4"], "asyncrl") == 2
    assert "the run has policies, for which there is no formula" in capsys.readouterr().err


def evaluate(run: Path, accuracy: Any, reward: Any) -> None:
    """Give each step a reward, and each second one an accuracy on held-out prompts."""

    def change(number: int, row: dict[str, Any]) -> None:
        row |= {"reward/mean": reward(number), "reward/right": 0.5, "reward/format": 2 * reward(number)}
        if number % 2:
            row["eval/held_out/accuracy"] = accuracy(number)

    change_rows(run, change)


def test_a_reward_that_rises_while_the_evaluation_falls_is_told_with_the_part_that_rose(run: Path) -> None:
    evaluate(run, lambda n: 0.8 - 0.02 * n, lambda n: 0.2 + 0.02 * n)
    reported = problems(run)["reward-exploited"]
    assert "accuracy on held_out fell from 0.700 (steps 2 to 10) to 0.300 (steps 22 to 30)" in reported
    assert "of its parts format rose most" in reported


@pytest.mark.parametrize(
    ("accuracy", "reward"),
    [
        (lambda n: 0.8 - 0.02 * n, lambda n: 0.8 - 0.02 * n),
        (lambda n: 0.2 + 0.02 * n, lambda n: 0.2 + 0.02 * n),
        (lambda n: 0.8 - 0.001 * n, lambda n: 0.2 + 0.02 * n),
        (lambda n: 0.5 + 0.2 * (n % 4 - 2), lambda n: 0.2 + 0.02 * n),
    ],
    ids=["both fall", "both rise", "hardly falls", "noise"],
)
def test_other_evaluations_are_no_sign_of_an_exploited_reward(run: Path, accuracy: Any, reward: Any) -> None:
    evaluate(run, accuracy, reward)
    assert "reward-exploited" not in problems(run)


def test_a_server_that_never_serves_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    VirtualRun(replace(Knobs(), speed=1000), run).play()
    served = (run / "observed" / "generation_server-0.jsonl").read_text().splitlines()
    lines = [
        {"at": json.loads(line)["at"], "pid": 2, "stage": "loads the model", "activity": "works", "since": 0.0}
        for line in served
    ]
    write(run / "observed" / "generation_server-1.jsonl", *lines)
    kinds = {each.kind: each for each in examine(History(run)).findings}
    assert "generation_server/1 loads the model, and the others serve" in kinds["slow-server"].sentence


@pytest.mark.parametrize(
    ("figures", "kind"),
    [
        ({"cpu_s": 0.05, "no_core_s": 1.9}, "no-cpu"),
        ({"cpu_s": 0.05, "late_s": 0.9}, "slow-server"),
    ],
)
def test_a_server_that_is_held_up_is_told_from_one_without_processors(
    figures: dict[str, float], kind: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    VirtualRun(replace(Knobs(), speed=500), run).play()
    file = run / "observed" / "generation_server-0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for number, line in enumerate(lines):
        line |= {name: value * number if name != "late_s" else value for name, value in figures.items()}
    write(file, *lines)
    found = {each.kind: each.sentence for each in examine(History(run)).findings}
    assert kind in found
    assert kind != "no-cpu" or re.search(r"in the mean \d\.\d of its threads were ready", found[kind])


@pytest.mark.parametrize(("no_core", "named"), [(0.05, True), (0.8, False)])
def test_a_loop_that_user_code_blocks_is_told_from_one_without_a_core(
    tmp_path: Path, no_core: float, named: bool
) -> None:
    run = tmp_path / "slow"
    VirtualRun(replace(Knobs(), reward_s=2.0), run).play()
    server = [json.loads(line) for line in (run / "observed" / "generation_server-0.jsonl").read_text().splitlines()]
    late = {"stage": "plays", "loop_late_s": 0.8, "late_s": 0.02}
    began = server[0]["at"]
    lines = [line | late | {"no_core_s": no_core * (line["at"] - began)} for line in server]
    write(run / "observed" / "rollout_worker-0.jsonl", *lines)
    on_time = [line | {"stage": "plays", "loop_late_s": 0.0, "no_core_s": 0.0} for line in server]
    write(run / "observed" / "rollout_worker-1.jsonl", *on_time)
    kinds = [each.kind for each in examine(History(run)).findings]
    assert ("blocked-event-loop" in kinds) is named
    assert "slow-reward" in kinds


def test_json_is_for_scripts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--json"], "asyncrl") == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["state"] == "finished"
    assert reported["step"] == 30
    assert {finding["level"] for finding in reported["findings"]} <= {"bottleneck", "notice"}
    assert reported["measured"]["batch"] == 16


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)], "asyncrl") == 2
    assert "is no run" in capsys.readouterr().err


def test_text_of_a_run_is_no_markup(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").unlink()
    write(run / "restarts.jsonl", {"restarted": "[bold]x[/bold]", "reason": "ended"})
    main([str(run)], "asyncrl")
    assert "[bold]x[/bold]" in capsys.readouterr().out


def test_a_long_advice_goes_on_below_itself_on_a_terminal(run: Path) -> None:
    out = io.StringIO()
    history = History(run)
    diagnosis = examine(history)
    long = replace(diagnosis, findings=[replace(diagnosis.findings[0], advice="More cores, " * 12)])
    show(history, long, Console(file=out, width=80, force_terminal=True, color_system=None))
    advice = out.getvalue().partition("  → ")[2].partition("  docs/")[0].splitlines()
    assert len(advice) > 1
    assert all(line.startswith(("    More", "    cores", "  → ")) for line in advice[1:])


def test_lines_of_the_ledger_that_are_none_are_passed_over(run: Path) -> None:
    file = run / "ledger" / "000001.jsonl"
    file.write_bytes(b"\xff\xfe not a line\n" + msgspec.json.encode({"kind": "new"}) + b"\n" + file.read_bytes())
    assert len(History(run).steps) == 30
