"""Entry point of every worker process: `python -m asyncrl.runtime.main <kind> <index> --run-dir DIR`."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import pkgutil
from pathlib import Path

from asyncrl.comm.files.private_files import PRIVATE_UMASK
from asyncrl.runtime.planning.process_kinds import PROCESS_KINDS
from asyncrl.runtime.planning.worker_plan import HOST_VARIABLE
from asyncrl.runtime.process.lasting_imports import lasting_imports
from asyncrl.runtime.process.worker import WorkerSpec
from asyncrl.runtime.process.worker_log import WorkerLogFilter


def main() -> int:
    """Run one worker to its end; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(PROCESS_KINDS))
    parser.add_argument("index", type=int)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--niceness", type=int, default=0, help="lower this process's priority by so much")
    parser.add_argument("--incarnation", type=int, default=0, help="how many before this one died")
    own = os.environ.get(HOST_VARIABLE, "")
    parser.add_argument("--host", default=own, help=f"address of this host; default: {HOST_VARIABLE}, or system.host")
    args = parser.parse_args()
    os.nice(args.niceness)
    os.umask(PRIVATE_UMASK)
    os.environ.pop("LOCAL_RANK", None)  # another launcher's, of which torch makes the number of a GPU
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s {args.kind}/{args.index} %(message)s",
        datefmt="%H:%M:%S",
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(WorkerLogFilter())
    with lasting_imports():
        worker_class = pkgutil.resolve_name(PROCESS_KINDS[args.kind].path)
    return int(worker_class(WorkerSpec(args.kind, args.index, args.run_dir, args.incarnation, args.host)).start())


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    os._exit(exit_code)  # all is closed by now; tearing torch's modules down would take seconds of a busy machine
