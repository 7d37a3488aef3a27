"""Servers that take turns with the trainer, in a run in which one dies while it sleeps, and the manager with it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolver, make_resolver
from asyncrl.config.run_dir import NAMES_DIR
from asyncrl.inference.client import MemoryTag

from ..conftest import LIMIT_S

pytestmark = pytest.mark.slow

STEPS = 8
ROUNDING_S = 0.002
"""Times of spans have milliseconds."""


def spans(run_dir: Path, *wanted: str) -> list[tuple[float, float, str]]:
    """Begin, end and lane of the spans of these names, of all processes."""
    lines = [json.loads(line) for file in run_dir.glob("observed/*.jsonl*") for line in file.read_text().splitlines()]
    return sorted((line["begin"], line["end"], line.get("lane", "")) for line in lines if line.get("span") in wanted)


def all_asleep(resolver: NameResolver) -> bool:
    """True if it is the trainer's turn, and every colocated server has given its memory back."""
    entry = resolver.get_subtree(names.TRAINER_TURN_KEY)
    training = any(names.TrainerTurn.decode(value).training for value in entry.values())
    memory = [names.ServerMemory.decode(value) for value in resolver.get_subtree(names.SERVER_MEMORY).values()]
    return training and len(memory) == 2 and all(each.released for each in memory)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def resolver_of() -> Iterator[Callable[[Any], NameResolver]]:
    made = []

    def of(run: Any) -> NameResolver:
        made.append(make_resolver("file", str(run.run_dir / NAMES_DIR)))
        return made[-1]

    yield of
    for resolver in made:
        resolver.close()


EVERY_ROLE = """
from dataclasses import replace

from asyncrl.master.graph import Call, Graph
from asyncrl.master.graph import ppo


def every_role(config, *, scorer):
    calls = [*ppo(config).calls]
    at = next(number for number, call in enumerate(calls) if call.name == "advantage")
    reads = ("scores", *calls[at].reads)
    calls[at] = replace(calls[at], reads=reads, args={"rewards": ["rewards", "scores"]})
    calls.insert(at, Call("score", "scorer", "reward", ("tokens",), ("scores",), args={"path": scorer}))
    return Graph("every_role", tuple(calls))
"""


def test_no_step_shares_the_device_with_a_colocated_server_whoever_dies(
    start_run: Any, resolver_of: Callable[[Any], NameResolver], tmp_path: Path, tiny_model: Path
) -> None:
    """Actor, critic, reference and reward model take turns on the device of the servers."""
    (tmp_path / "graph.py").write_text(EVERY_ROLE)
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained(tmp_path / "scorer")
    run = start_run(
        algorithm__graph=f"{tmp_path / 'graph.py'}:every_role",
        algorithm__graph_args__scorer=tmp_path / "scorer",
        algorithm__advantage__name="gae",
        algorithm__kl_coef=0.01,
        total_train_steps=STEPS,
        eval__interval=4,
        max_head_offpolicyness=1,
        generation__colocated="all",
        generation__servers=2,
        trainer__offload=True,
    )
    run.wait_for_step(2)
    resolver, master = resolver_of(run), run.worker("master_worker/0")
    while True:  # a master that stands still holds the turn
        until(lambda: all_asleep(resolver))
        master.suspend()
        if all_asleep(resolver):
            break
        master.resume()
    killed = run.worker("generation_server/0")
    killed.kill()
    status = names.status_key(names.GENERATION_SERVER, 0)

    def incarnation() -> int:
        value = resolver.get_subtree(status).get(status)
        return 0 if value is None else names.WorkerStatus.decode(value).incarnation

    until(lambda: incarnation() == 1)
    assert all_asleep(resolver), "a colocated server that begins waits for its turn"
    master.resume()
    run.worker("gserver_manager/0").kill()
    run.wait_for_line("the brain went on after")
    assert run.wait() == 0, run.output + run.logs()
    assert [row["step"] for row in run.rows() if row["step"]] == list(range(1, STEPS + 1))
    assert all(row["critic/loss"] > 0 and row["kl/reference"] >= 0 and row["reward/scores"] for row in run.rows())
    steps, resident = spans(run.run_dir, "train", "publish", "turn"), spans(run.run_dir, "resident")
    assert {lane for _, _, lane in resident} == {"generation_server/0", "generation_server/1"}
    beside = [
        (step, server)
        for step in steps
        for server in resident
        if step[0] < server[1] - ROUNDING_S and server[0] < step[1] - ROUNDING_S
    ]
    assert beside == []
    last = {index: max(end for _, end, lane in resident if lane.endswith(f"/{index}")) for index in range(2)}
    assert min(last.values()) > steps[-1][0], "the one that was killed serves again"
    log = (run.run_dir / "logs" / "generation_server-1.log").read_text()
    assert log.count("released ") == log.count(f"({', '.join(sorted(MemoryTag))})") >= 2
