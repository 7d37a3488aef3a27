"""Load of idle processes on etcd: requests per second, by etcd's own count (`grpc_server_msg_received_total`).

    python benchmarks/name_resolve.py [--processes 4 16 64] [--seconds 20]

Each of N RolloutWorkers has its three entries, with leases of 10 s, and follows the N presences and the training ranks,
as the processes of a run do. Target: a process costs etcd less than one request a second. Needs an etcd binary.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator

from common import Table, parser, verdict

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameBackend, make_resolver

LEASE_S = 10.0
START_LIMIT_S = 30.0
SETTLE_S = 3.0


def free_port() -> int:
    """Return a port that nobody listens at."""
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
            make_resolver(NameBackend.etcd3, "/probe", access={"addresses": address}, patience_s=START_LIMIT_S).close()
            yield address
        finally:
            server.kill()
            server.wait()


def requests(address: str) -> float:
    """Messages of clients so far."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=START_LIMIT_S) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("grpc_server_msg_received_total"))


def measure(address: str, processes: int, seconds: float) -> float:
    """Return the requests per second of this many idle processes."""
    root = f"/asyncrl/{processes}"
    resolvers = [make_resolver(NameBackend.etcd3, root, access={"addresses": address}) for _ in range(processes)]
    try:
        for index, resolver in enumerate(resolvers):
            entries = (names.status_key(names.ROLLOUT_WORKER, index), names.worker_key(names.ROLLOUT_WORKER, index))
            for key in (*entries, f"{names.PUSHERS}/{index}"):
                resolver.add(key, "x" * 60, lease_s=LEASE_S, replace=True)
        for resolver in resolvers:
            resolver.follow(names.PULLERS)
            resolver.follow(names.PUSHERS)
        time.sleep(SETTLE_S)
        before, began = requests(address), time.monotonic()
        time.sleep(seconds)
        return (requests(address) - before) / (time.monotonic() - began)
    finally:
        for resolver in resolvers:
            resolver.close()


def main() -> None:
    """Print the table."""
    command = parser(__doc__)
    command.add_argument("--processes", type=int, nargs="+", default=[4, 16, 64])
    command.add_argument("--seconds", type=float, default=20.0)
    args = command.parse_args()
    table = Table("processes", "requests a second", "below one a process")
    with etcd() as address:
        for processes in args.processes:
            found = measure(address, processes, args.seconds)
            table.row(processes, f"{found:.1f}", verdict(found, processes))


if __name__ == "__main__":
    main()
