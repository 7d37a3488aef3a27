"""Whole runs with a real, pretrained chat model: SmolLM2-135M, its tokenizer and its chat template."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.launch.__main__ import main
from asyncrl.launch.commands.audit import audit
from asyncrl.runtime.process.hardware import cpu_bfloat16

from ..conftest import CHAT_MODEL, SGLANG_ENV

pytestmark = [
    pytest.mark.slow,
    pytest.mark.smollm2,
    pytest.mark.usefixtures("chat_model"),
]
SGLANG_PYTHON = os.environ.get("ASYNCRL_SGLANG_PYTHON")
STEPS = 2
SHORT: dict[str, Any] = {
    "experiment_name": "sentence",
    "model__path": CHAT_MODEL,
    "dataset__max_prompt_tokens": None,
    "rollout__sampling__max_new_tokens": 12,
    "total_train_steps": STEPS,
    "train_batch_size": 2,
    "group_size": 2,
    "max_head_offpolicyness": 1,
    "eval__interval": STEPS,
    "eval__size": 2,
    "checkpoint__interval": STEPS,
}


LETTERS = "def letters(data, completion): return completion.count('e') / max(len(completion), 1)"
"""A reward that differs between any two answers; the experiment's is 0 for nearly all of so few."""


def reward(folder: Path) -> str:
    (folder / "letters.py").write_text(LETTERS)
    return f"{folder / 'letters.py'}:letters"


def logits(folder: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    message = [{"role": "user", "content": "Write one short sentence."}]
    tokens = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(**tokens).logits[0, -1]


def test_it_trains_in_the_cpus_type_through_a_kill_and_transformers_reads_the_export(
    start_run: Any, tmp_path: Path
) -> None:
    """Where the CPU computes it, both engines compute in bfloat16, as on GPUs, with float32 masters."""
    dtype = "bfloat16" if cpu_bfloat16() else "float32"  # else at a quarter of the speed: minutes for a parity check
    run = start_run(
        "smollm2_sentence",
        **SHORT,
        reward__path=reward(tmp_path),
        model__dtype=dtype,
        generation__dtype=dtype,
    )
    run.wait_for_step(1)
    run.worker("model_worker/0").kill()
    assert run.wait() == 0, run.output + run.logs()
    rows = run.rows()
    assert [row["step"] for row in rows if row["step"]] == [1, 2]
    assert max(row["staleness/max"] for row in rows if row["step"]) <= 1
    assert audit(run.run_dir).findings == ()
    assert main(["export", str(run.run_dir), str(tmp_path / "out")]) == 0
    assert torch.isfinite(logits(tmp_path / "out")).all()
    assert not torch.equal(logits(tmp_path / "out"), logits(CHAT_MODEL)), "nothing was learnt"


@pytest.mark.sglang
@pytest.mark.skipif(SGLANG_PYTHON is None, reason="ASYNCRL_SGLANG_PYTHON names no interpreter with SGLang")
def test_sglang_serves_its_adapters_in_float32_with_the_trainers_log_probabilities(
    start_run: Any, tmp_path: Path
) -> None:
    run = start_run(
        "smollm2_sentence",
        **SHORT,
        reward__path=reward(tmp_path),
        model__dtype="float32",
        model__lora__rank=4,
        optimizer__lr=1e-3,
        generation__backend="sglang",
        generation__dtype="float32",
        generation__sglang__python=SGLANG_PYTHON,
        **{f"+generation.sglang.env.{name}": value for name, value in SGLANG_ENV.items()},
        generation__device="cpu",
    )
    assert run.wait() == 0, run.output + run.logs()
    rows = [row for row in run.rows() if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["ppo/behave_kl"] < 1e-6, "SGLang's log-probabilities of version 0 are not the trainer's"
    log = (run.run_dir / "logs" / "gserver_manager-0.log").read_text()
    assert "does not serve the trainer's" not in log
    assert re.findall(r"generation server 0 agrees with the trainer on v[12]", log), log
    assert audit(run.run_dir).findings == ()
    assert main(["export", str(run.run_dir), str(tmp_path / "out")]) == 0  # adapters are merged
    assert not torch.equal(logits(tmp_path / "out"), logits(CHAT_MODEL)), "nothing was learnt"
