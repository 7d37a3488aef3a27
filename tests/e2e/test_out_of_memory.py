"""Whole runs that run out of memory: in the trainer, in a server, and in /dev/shm."""

from __future__ import annotations

import subprocess
import sys
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

if "generation_server" in sys.orig_argv:
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
IN_SMALL_MEMORY = """
import os, subprocess, sys

subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={sys.argv[1]}", "tmpfs", "/dev/shm"], check=True)
os.execv(sys.argv[2], sys.argv[2:])
"""
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


def test_a_server_that_runs_out_of_memory_says_so_and_the_run_goes_on(start_run: Any, tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "sitecustomize.py").write_text(LARGE_SERVER)
    run = start_run(inside=("env", f"PYTHONPATH={tmp_path / 'server'}"), eval__interval=0)
    assert run.wait() == 0, run.output
    history = History(run.run_dir)
    assert max(history.steps) == 6
    shortage = history.processes["generation_server/0"].last["shortage"]
    assert "out of memory: the embedded engine on the CPU in a step: " in shortage["what"]
    assert "to need less memory, in this order: " in shortage["advice"]


def test_a_full_shared_memory_is_remarked_and_the_run_goes_on(start_run: Any) -> None:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a small /dev/shm can only be mounted by root")
    inside = ("unshare", "--mount", sys.executable, "-c", IN_SMALL_MEMORY, SMALL_MEMORY)
    run = start_run(inside=inside, eval__interval=0)
    assert run.wait() == 0, run.output
    history = History(run.run_dir)
    assert max(history.steps) == 6
    assert any("No space left on device" in remark for remark in history.notices), history.notices
