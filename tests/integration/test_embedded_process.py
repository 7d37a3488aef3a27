"""`python -m asyncrl.inference.embedded` as a process: it serves, and leaves nothing on SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

LIMIT_S = 300.0


def test_the_command_serves_a_folder_and_ends_on_sigterm(tmp_path: Path, warm_python: str) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    command = [warm_python, "-m", "asyncrl.inference.embedded", "--model-path", str(tmp_path), "--port", "0"]
    command += ["--skip-tokenizer-init", "--api-key", "k", "--weight-version", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("listening on http://127.0.0.1:"), line
            body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
            request = urllib.request.Request(
                line.split()[-1] + "/generate", json.dumps(body).encode(), {"Authorization": "Bearer k"}
            )
            with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
                answer = json.load(reply)
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=LIMIT_S) == 0
        finally:
            server.kill()
    assert set(answer) == {"output_ids", "meta_info"}
    assert len(answer["output_ids"]) == 4
    assert answer["meta_info"]["weight_version"] == "3"


def test_seeds_and_request_types_need_no_torch() -> None:
    program = (
        "import sys, asyncrl.inference.random_streams, asyncrl.inference.engine_io, "
        "asyncrl.inference.http_calls; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=LIMIT_S, check=False).returncode == 0
