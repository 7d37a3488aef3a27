"""Online sessions from several clients at once, while a RolloutWorker, a server and the brain are killed.

    python tests/stress/online.py [--sessions 200] [--clients 3] [setting=value ...]

The clients (`tests/online_clients.py`) are no part of the run; each has four sessions at a time. Some sessions fall
silent, are rejected, or are rewarded twice or with another reward. The run passes if it finished by itself, the audit
finds nothing (no token older than the bound, no rollout trained twice), and each reward that was trained is one that a
client gave, once; all other rollouts are counted by name. The target is that.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.online_clients import Clients

KILLED = ("rollout_worker/0", "generation_server/0", "gserver_manager/0")
AT_ONCE = 4
"""Sessions of one client at a time."""
BATCH = 4
SETTINGS = {
    "experiment_name": "online_stress",
    "train_batch_size": BATCH,
    "group_size": 1,
    "algorithm.advantage.name": "rae",
    "max_head_offpolicyness": 2,
    "trainer.ppo_minibatches": 2,
    "rollout.workers": 2,
    "rollout.sampling.max_new_tokens": 48,
    "agent.args": "{lease_s: 3.0, hold_s: 10.0, wait_s: 30.0}",
    "eval.interval": 0,
    "logging.tensorboard": "false",
}
LIMIT_S = 1800.0


def main() -> int:
    """Run it, and print what became of the sessions; 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrl-online-") as folder:
        run_dir = Path(folder) / "online_stress" / "trial0"
        steps = max(4, -(-args.sessions * 5 // (6 * BATCH)))  # others are silent, are rejected, or die
        settings = SETTINGS | {"fileroot": folder, "total_train_steps": steps}
        command = [sys.executable, "-m", "asyncrl.launch", "online", *(f"{k}={v}" for k, v in settings.items())]
        launcher = subprocess.Popen([*command, *args.settings], stdout=sys.stderr, start_new_session=True)
        try:
            _until(lambda: (run_dir / "online" / "key").exists(), launcher)
            clients = Clients(run_dir, AT_ONCE * args.clients, patience_s=120.0, think_s=1.5)
            for number, name in enumerate(KILLED, 1):
                _until(partial(_has_trained, run_dir, number * steps // (len(KILLED) + 1)), launcher)
                _kill(launcher, name)
            code = launcher.wait(LIMIT_S)
            clients.join(LIMIT_S)
            audit = subprocess.run([sys.executable, "-m", "asyncrl.launch", "audit", str(run_dir)], check=False)
            trained = clients.check(run_dir)
            books = json.loads((run_dir / "summary.json").read_text())["books"]
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGTERM)
                launcher.wait(60)
    print(f"{clients.opened} sessions of {args.clients} clients, {len(clients.accepted)} rewards taken")
    print(f"{len(trained)} trained once; dropped: {books['dropped']}; abandoned at the end: {books['abandoned']}")
    print(f"calls refused, by status (0: nobody answered): {dict(clients.refused)}")
    return int(code != 0 or audit.returncode != 0 or len(trained) != steps * BATCH)


def _has_trained(run_dir: Path, steps: int) -> bool:
    rows = run_dir / "metrics.jsonl"
    return rows.exists() and rows.read_text().count("\n") >= steps


def _kill(launcher: subprocess.Popen[bytes], name: str) -> None:
    """SIGKILL the process of this name."""
    for process in psutil.Process(launcher.pid).children(recursive=True):
        if " ".join(process.cmdline()).startswith(f"asyncrl {name} "):
            print(f"kills {name}", file=sys.stderr)
            process.kill()
            return
    raise SystemExit(f"there is no {name}")


def _until(so: Callable[[], bool], launcher: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not so():
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run ended with {launcher.poll()}, or takes too long")
        time.sleep(0.2)


if __name__ == "__main__":
    raise SystemExit(main())
