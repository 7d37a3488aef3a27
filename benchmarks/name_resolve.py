"""Load of idle processes on name resolution: requests per second at etcd, and files opened in a folder.

    python benchmarks/name_resolve.py [--processes 4 16 64] [--seconds S] [--json PATH]

Each of N RolloutWorkers has its three entries, with leases of 10 s, and knows the N presences and the training ranks.
`polled`: each reads both subtrees once a second. `followed`: as the processes do it. Both renew leases as today, once a
third of the lease for all entries of a process. Targets: followed, a process costs etcd less than one request a second
and no entry is sent again and again; a folder that does not change is not read.

Needs an etcd binary. Requests are etcd's own count (`grpc_server_msg_received_total`). With a lease per entry, each
renewed and read by itself, and polled, as it was before, N = 4, 16, 64 made 15, 60, 243 requests and 16, 256, 4,096
entries a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from asyncrl.comm import names
from asyncrl.comm.name_resolve import EtcdAccess, FileResolver, NameBackend, NameResolver, make_resolver

LEASE_S = 10.0
START_LIMIT_S = 30.0
ETCD, FOLDER = "requests at etcd", "files opened and listings"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def etcd() -> Iterator[str]:
    """A server that ends with the block; gives its address."""
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        command = ["etcd", f"--data-dir={folder}/data", f"--initial-cluster=default={peer}"]
        command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            address = client.removeprefix("http://")
            make_resolver(NameBackend.etcd3, "/probe", etcd=EtcdAccess.at(address), patience_s=START_LIMIT_S).close()
            yield address
        finally:
            server.kill()
            server.wait()


def requests(address: str) -> int:
    """Messages of clients so far."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=START_LIMIT_S) as reply:
        lines = reply.read().decode().splitlines()
    return int(
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("grpc_server_msg_received_total"))
    )


class Opened:
    """Counts what is opened and listed by this process in folders of names."""

    def __init__(self) -> None:
        self.count = 0
        Path.open = self._counted(Path.open)  # type: ignore[method-assign]
        os.listdir = self._counted(os.listdir)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return call(*args, **kwargs)

        return counted


def measure(
    make: Callable[[], NameResolver], count: Callable[[], int], processes: int, follow: bool, s: float
) -> float:
    """Return the rate of `count` per second with this many idle processes."""
    stop = threading.Event()
    resolvers = [make() for _ in range(processes)]
    threads = []
    try:
        for index, resolver in enumerate(resolvers):
            entries = (names.status_key(names.ROLLOUT_WORKER, index), names.worker_key(names.ROLLOUT_WORKER, index))
            for key in (*entries, names.pusher_key(index)):
                resolver.add(key, "x" * 60, lease_s=LEASE_S, replace=True)
        for resolver in resolvers:
            if follow:
                resolver.follow(names.PULLERS)
                resolver.follow(names.PUSHERS)
            else:
                threads.append(threading.Thread(target=poll, args=(resolver, stop)))
                threads[-1].start()
        time.sleep(3.0)
        before, began = count(), time.monotonic()
        time.sleep(s)
        return (count() - before) / (time.monotonic() - began)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for resolver in resolvers:
            resolver.close()


def poll(resolver: NameResolver, stop: threading.Event) -> None:
    while not stop.wait(1.0):
        resolver.get_subtree(names.PULLERS)
        resolver.get_subtree(names.PUSHERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    opened, rows = Opened(), []
    with etcd() as address, tempfile.TemporaryDirectory() as folder:
        for processes in args.processes:
            for follow in (False, True):
                how = "followed" if follow else "polled"
                root = f"/asyncrl/{how}{processes}"

                def at_etcd(root: str = root) -> NameResolver:
                    return make_resolver(NameBackend.etcd3, root, etcd=EtcdAccess.at(address))

                def in_folder(name: str = f"{folder}/{how}{processes}") -> NameResolver:
                    return FileResolver(name)

                asked = measure(at_etcd, lambda: requests(address), processes, follow, args.seconds)
                read = measure(in_folder, lambda: opened.count, processes, follow, args.seconds)
                rows.append({"processes": processes, "how": how, ETCD: asked, FOLDER: read})
                print(f"{processes:4} {how:9} {asked:8.1f} {ETCD}   {read:8.1f} {FOLDER}   a second", flush=True)
    for row in rows:
        if row["how"] == "followed":
            verdict = "met" if row[ETCD] < row["processes"] else "missed"
            print(f"{row['processes']} processes followed, below {row['processes']} requests a second: {verdict}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
