"""A whole run whose trainer runs out of memory. Servers and /dev/shm are in `test_gpu_benchmark_run.py`."""

from __future__ import annotations

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
