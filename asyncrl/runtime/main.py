"""Entry point of every worker process: `python -m asyncrl.runtime.main <kind> <index> --run-dir DIR`."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import sys
from pathlib import Path

WORKERS = {
    "master_worker": "asyncrl.master.process:MasterWorker",
    "model_worker": "asyncrl.trainer.process:ModelWorker",
    "generation_server": "asyncrl.inference.process:GenerationServer",
    "gserver_manager": "asyncrl.manager.process:GserverManager",
    "rollout_worker": "asyncrl.rollout.process:RolloutWorker",
}

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends. Linux only; elsewhere does nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Run one worker to its end; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(WORKERS))
    parser.add_argument("index", type=int)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, help="end when this process, the parent, ends")
    parser.add_argument("--niceness", type=int, default=0, help="lower this process's priority by so much")
    args = parser.parse_args()
    os.nice(args.niceness)
    if args.parent_pid is not None:
        die_with_parent(args.parent_pid)
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s {args.kind}/{args.index} %(message)s",
        datefmt="%H:%M:%S",
    )
    from asyncrl.runtime.worker import WorkerSpec

    module, name = WORKERS[args.kind].split(":")
    worker_class = vars(importlib.import_module(module))[name]
    code: int = worker_class(WorkerSpec(args.kind, args.index, args.run_dir)).start()
    return code


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    os._exit(exit_code)  # all is closed by now; tearing torch's modules down would take seconds of a busy machine
