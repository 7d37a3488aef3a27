"""Whole runs that run out of memory: in the trainer, in a server, and in /dev/shm."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.doctor import examine
from asyncrl.observe.history import History

pytestmark = pytest.mark.slow

LOSS = """
import torch

from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.policy_losses import reinforce

calls = 0


def large(inputs: PolicyLossInputs) -> PolicyLossOutput:
    global calls
    calls += 1
    if calls > 8:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of")
    return PolicyLossOutput(reinforce(inputs).loss_T, inputs.mask_T)
"""

LARGE_SERVER = """
import sys

if "generation_server" in sys.argv:
    import torch

    from asyncrl.inference.embedded.scheduler import DecodeBatch

    calls, step = [], DecodeBatch.step

    def large(self):
        calls.append(1)
        if len(calls) == 12:
            torch.empty(1 << 50, dtype=torch.uint8)  # bytes that no machine has
        return step(self)

    DecodeBatch.step = large
"""
"""A `sitecustomize` by which the embedded engine runs out of memory once."""
WHERE_MEMORY_IS_SMALL = """
import ctypes, os

folder = os.getcwd()
with open("{namespace}") as file:
    assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
os.chdir(folder)
"""
"""A `sitecustomize` by which a process has the mounts of another."""
SMALL_MEMORY = "128k"
"""Size of a /dev/shm without room for the tiny model's in-memory checkpoint."""


def test_a_trainer_that_runs_out_of_memory_ends_the_run_once_with_the_settings_to_lower(
    start_run: Any, tmp_path: Path
) -> None:
    file = tmp_path / "losses.py"
    file.write_text(LOSS)
    run = start_run(algorithm__policy_loss__name=f"{file}:large", eval__interval=0, total_train_steps=100_000)
    assert run.wait() == 1, run.output
    assert "out of memory: model_worker/0 on the CPU in call 'actor_train' (role 'actor') of step " in run.output
    assert "tried to allocate 1.16 GiB" in run.output
    assert "to need less memory, in this order: trainer.gradient_checkpointing=true; trainer.tokens" in run.output
    assert "Traceback" not in run.output, "the terminal shows one message"
    assert "Traceback" in (run.run_dir / "logs" / "model_worker-0.log").read_text()
    assert not (run.run_dir / "restarts.jsonl").exists(), "a restart would train the same step again"
    findings = {finding.kind: finding for finding in examine(History(run.run_dir)).findings}
    assert "model_worker/0 on the CPU in call 'actor_train'" in findings["out-of-memory"].sentence
    assert findings["out-of-memory"].advice.startswith("To need less memory, in this order: trainer.")
    assert run.survivors() == []


def have(customised: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have processes of runs begin with this `sitecustomize`."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(customised)
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"), prepend=os.pathsep)


def test_a_server_that_runs_out_of_memory_says_so_and_the_run_goes_on(
    start_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(LARGE_SERVER, tmp_path, monkeypatch)
    run = start_run(eval__interval=0)
    assert run.wait() == 0, run.output
    history = History(run.run_dir)
    assert max(history.steps) == 6
    shortage = history.processes["generation_server/0"].last["shortage"]
    assert "out of memory: the embedded engine on the CPU in a step: " in shortage["what"]
    assert "to need less memory, in this order: " in shortage["advice"]


@pytest.fixture
def small_memory() -> Iterator[str]:
    """A namespace of mounts with a small /dev/shm."""
    small = f"mount -t tmpfs -o size={SMALL_MEMORY} tmpfs /dev/shm && echo there && exec cat"
    command = ["unshare", "--mount", "sh", "-c", small]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "there\n":
            pytest.skip("a small /dev/shm can only be mounted by root")
        yield f"/proc/{holder.pid}/ns/mnt"
        holder.communicate()


def test_a_full_shared_memory_is_noticed_and_the_run_goes_on(
    start_run: Any, tmp_path: Path, small_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(WHERE_MEMORY_IS_SMALL.format(namespace=small_memory), tmp_path, monkeypatch)
    run = start_run(eval__interval=0)
    assert run.wait() == 0, run.output
    history = History(run.run_dir)
    assert max(history.steps) == 6
    assert any("No space left on device" in notice for notice in history.notices), history.notices
