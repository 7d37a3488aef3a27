"""The GenerationServer process: registration, death and restart of its engine, its own end."""

from __future__ import annotations

import json
import os
import signal
import ssl
import stat
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolver, make_resolver
from asyncrl.comm.security import RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import SECRET_FILE, write_run_config
from asyncrl.runtime.settings import EXIT_LOST
from asyncrl.runtime.supervisor import STOP_SIGNAL

from ..warm import WarmProcess

LIMIT_S = 300.0
pytestmark = pytest.mark.slow

FAKE_SGLANG = textwrap.dedent(
    """
    import http.server, json, os, ssl, sys, time

    while os.path.exists(os.environ.get("HOLD", "")):
        time.sleep(0.01)

    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self, content):
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def do_GET(self):
            if self.path == "/too_much":
                print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.", *"x" * 70, sep="\\n")
                os._exit(1)
            self.reply({"disable_radix_cache": "--disable-radix-cache" in sys.argv})

        def do_POST(self):
            spans = {"weight_versions": []} if "TELLS_VERSIONS" in os.environ else {}
            self.reply({"output_ids": [0], "meta_info": {"weight_version": "0"} | spans})

    port = int(sys.argv[sys.argv.index("--port") + 1])
    files = json.load(open(sys.argv[sys.argv.index("--config") + 1]))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["ssl-certfile"], files["ssl-keyfile"])
    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
    """
)


@pytest.fixture
def config(tmp_path: Path) -> ExperimentConfig:
    config = ExperimentConfig()
    config.model.path = str(tmp_path / "model")
    config.generation.start_timeout_s = LIMIT_S
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=17,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
        )
    ).save_pretrained(config.model.path)
    return config


@pytest.fixture
def resolver(tmp_path: Path) -> Iterator[NameResolver]:
    resolver = make_resolver("file", str(tmp_path / "run" / "name_resolve"))
    yield resolver
    resolver.close()


Process = subprocess.Popen[str] | WarmProcess
Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path, start_worker: Callable[[str, int, Path], Process]) -> Iterator[Start]:
    """Starts the process with a config, in `cold` from nothing; ends it after the test."""
    started = []

    def run(config: ExperimentConfig, *, cold: bool = False) -> Process:
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        write_run_config(config, run_dir)
        if not (run_dir / SECRET_FILE).exists():
            RunSecret.create(run_dir / SECRET_FILE)
        if not cold:
            return start_worker("generation_server", 0, run_dir)
        argv = ["-m", "asyncrl.runtime.main", "generation_server", "0", "--run-dir", str(run_dir)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen([sys.executable, *argv], env=environment, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def use_fake_sglang(config: ExperimentConfig, folder: Path) -> None:
    (folder / "fake.py").write_text(FAKE_SGLANG)
    interpreter = folder / "python"
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder / "fake.py"}" "$@"\n')
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    config.generation.backend = "sglang"
    config.generation.sglang.python = str(interpreter)


def status(resolver: NameResolver) -> names.WorkerStatus:
    return names.WorkerStatus.decode(resolver.get(names.status_key("generation_server", 0)))


@pytest.mark.parametrize("backend", ["embedded", "sglang"])
def test_it_registers_its_engine_while_it_serves_and_ends_cleanly_when_asked(
    backend: str, config: ExperimentConfig, resolver: NameResolver, start: Start, tmp_path: Path
) -> None:
    if backend == "sglang":
        use_fake_sglang(config, tmp_path)
    process = start(config)
    registration = names.GenerationServerEntry.decode(resolver.wait(names.gen_server_key(0), LIMIT_S))
    assert registration.version == 0
    assert registration.url.startswith("https://127.0.0.1:")
    assert psutil.pid_exists(registration.pid)
    assert psutil.Process(process.pid).cmdline()[0].startswith("asyncrl generation_server/0 [")
    children = psutil.Process(process.pid).children(recursive=True)

    process.send_signal(STOP_SIGNAL)

    assert process.wait(LIMIT_S) == 0
    assert status(resolver).state == "done"
    assert names.gen_server_key(0) not in resolver.get_subtree()
    assert not [child for child in children if child.is_running()]


def test_a_server_whose_answers_name_no_versions_is_refused_where_answers_span_updates(
    config: ExperimentConfig, resolver: NameResolver, start: Start, tmp_path: Path
) -> None:
    use_fake_sglang(config, tmp_path)
    config.manager.update_mode = "retract"
    assert start(config).wait(LIMIT_S) != 0
    assert "SGLang 0.5.20 or newer, or update_mode=interrupt" in status(resolver).reason
    assert names.gen_server_key(0) not in resolver.get_subtree()


def test_a_server_that_would_spread_keys_of_old_weights_is_refused_where_they_stay_in_place(
    config: ExperimentConfig, resolver: NameResolver, start: Start, tmp_path: Path
) -> None:
    use_fake_sglang(config, tmp_path)
    config.manager.update_mode = "in_place"
    config.generation.sglang.env = {"TELLS_VERSIONS": "1"}
    config.generation.sglang.args = {"disable_radix_cache": False}
    assert start(config).wait(LIMIT_S) != 0
    assert "start it with --disable-radix-cache, or use update_mode=retract" in status(resolver).reason
    config.generation.sglang.args = {}
    start(config)
    assert resolver.watch(names.gen_server_key(0), LIMIT_S) is not None


def test_torch_is_not_loaded_around_a_server_of_its_own(
    config: ExperimentConfig, resolver: NameResolver, start: Start, tmp_path: Path
) -> None:
    use_fake_sglang(config, tmp_path)
    process = start(config, cold=True)
    resolver.wait(names.gen_server_key(0), LIMIT_S)
    libraries = {Path(region.path).name for region in psutil.Process(process.pid).memory_maps()}
    assert not [name for name in libraries if "torch" in name]


def test_an_engine_that_dies_is_started_again_at_a_new_address_until_that_is_hopeless(
    config: ExperimentConfig, resolver: NameResolver, start: Start, tmp_path: Path
) -> None:
    use_fake_sglang(config, tmp_path)
    config.system.restarts_per_process = 3
    process = start(config)
    key = names.gen_server_key(0)
    registration = resolver.wait(key, LIMIT_S)
    for _ in range(3):
        psutil.Process(names.GenerationServerEntry.decode(registration).pid).kill()
        resolver.watch(key, LIMIT_S, last=registration)  # it is gone, or the next one is there already
        registration = resolver.wait(key, LIMIT_S)
        await_state(resolver, "ready")
    psutil.Process(names.GenerationServerEntry.decode(registration).pid).kill()

    assert process.wait(LIMIT_S) == 1
    last = status(resolver)
    assert last.state == "failed"
    assert "was killed by SIGKILL" in last.reason
    assert "given up after 3 restarts" in last.reason


def test_a_server_that_runs_out_of_memory_while_it_serves_is_started_again_and_the_terminal_says_what_to_lower(
    config: ExperimentConfig, resolver: NameResolver, start: Start, tmp_path: Path
) -> None:
    use_fake_sglang(config, tmp_path)
    config.system.restarts_per_process = 1
    process = start(config)
    key = names.gen_server_key(0)
    registration: str | None = None
    for _ in range(2):
        registration = resolver.watch(key, LIMIT_S, last=registration) or resolver.wait(key, LIMIT_S)
        with pytest.raises(OSError):
            urllib.request.urlopen(
                f"{names.GenerationServerEntry.decode(registration).url}/too_much",
                context=ssl._create_unverified_context(),
                timeout=LIMIT_S,
            )
    assert process.wait(LIMIT_S) == 1
    messages = [json.loads(line)["remark"] for line in (tmp_path / "run" / "remarks.jsonl").read_text().splitlines()]
    assert len(messages) == 1
    assert messages[0].startswith("WARNING: generation_server/0 starts its engine again: torch.OutOf")
    for text in (messages[0], status(resolver).reason):
        assert "to need less memory, in this order: lower generation.sglang.args.mem_fraction_static" in text
    assert status(resolver).reason.startswith("EngineFailed: SGLang: ")


def await_state(resolver: NameResolver, state: str) -> str:
    """Wait until it says so of itself; what it says."""
    reported: str | None = None
    while reported is None or names.WorkerStatus.decode(reported).state != state:
        reported = resolver.watch(names.status_key("generation_server", 0), LIMIT_S, last=reported)
    return reported


def await_lapse(resolver: NameResolver) -> None:
    """Wait until its lease has run out."""
    reported: str | None = "something else"
    while reported is not None:
        reported = resolver.watch(names.status_key("generation_server", 0), LIMIT_S, last=reported)


def give_up(resolver: NameResolver) -> str:
    """As the launcher and a successor on another host do; the successor's registration."""
    entry = names.GenerationServerEntry("https://127.0.0.1:1", 1, 0).encode()
    resolver.add(names.incarnation_key("generation_server", 0), "1", replace=True)
    resolver.add(names.gen_server_key(0), entry, replace=True)
    return entry


def test_one_that_was_given_up_and_whose_engine_ends_leaves_its_successors_name_alone(
    config: ExperimentConfig, resolver: NameResolver, start: Start, tmp_path: Path
) -> None:
    """It starts the engine again before it looks whether its lease still is its own; then it ends without a word."""
    use_fake_sglang(config, tmp_path)
    config.system.lease_s = 10 * LIMIT_S
    process = start(config)
    await_state(resolver, "ready")
    registration = names.GenerationServerEntry.decode(resolver.get(names.gen_server_key(0)))
    successor = give_up(resolver)
    psutil.Process(registration.pid).kill()
    assert process.wait(LIMIT_S) == EXIT_LOST
    assert resolver.get(names.gen_server_key(0)) == successor


@pytest.mark.parametrize("state", ["starting", "ready"])
def test_one_that_is_stopped_and_wakes_after_its_successor_came_ends_and_takes_no_name(
    state: str, config: ExperimentConfig, resolver: NameResolver, start: Start, tmp_path: Path
) -> None:
    use_fake_sglang(config, tmp_path)
    hold = tmp_path / "hold"
    if state == "starting":
        hold.touch()
    config.generation.sglang.env = {"HOLD": str(hold)}
    config.system.lease_s = 2.0
    process = start(config)
    await_state(resolver, state)
    process.send_signal(signal.SIGSTOP)
    hold.unlink(missing_ok=True)
    await_lapse(resolver)
    successor = give_up(resolver)
    process.send_signal(signal.SIGCONT)
    assert process.wait(LIMIT_S) == EXIT_LOST
    assert resolver.get_subtree(names.GENERATION_SERVERS) == {names.gen_server_key(0): successor}
    assert names.status_key("generation_server", 0) not in resolver.get_subtree()


def test_an_engine_that_cannot_start_ends_the_process_with_the_reason(
    config: ExperimentConfig, resolver: NameResolver, start: Start, tmp_path: Path
) -> None:
    use_fake_sglang(config, tmp_path)
    (tmp_path / "fake.py").write_text("raise SystemExit('no such model')")
    assert start(config).wait(LIMIT_S) == 1
    assert "no such model" in status(resolver).reason
