"""Hosts with addresses of their own on one machine: network namespaces on a switch that can lose, delay and cut off.

Each host is a namespace with a TAP device, `eth0`; the switch is a thread of the test that carries frames from one to
another. So whatever is done to a host's packets needs no kernel module and no rule of a firewall, is the same on every
machine, and is nothing that a process on that host could notice otherwise: the link stays up, nobody answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_MTU = 9000  # fewer frames through the switch; what a data centre has
_FRAME_BYTES = _MTU + 64


@dataclass
class Host:
    """One host; whoever changes its fields changes what its link does from now on.

    Attributes:
        address: of its `eth0`.
        namespace: its network namespace's name.
        cut: nothing comes or goes.
        loss: share of the frames, each way, that are lost.
        delay_s: how much later a frame arrives, each way.
    """

    address: str
    namespace: str
    cut: bool = False
    loss: float = 0.0
    delay_s: float = 0.0
    lost: int = field(default=0, init=False)
    carried: int = field(default=0, init=False)

    @property
    def inside(self) -> list[str]:
        """Return the beginning of a command line that is to run on this host."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}"]


class Network:
    """`hosts` on a switch; made by `network`."""

    def __init__(self, hosts: Sequence[Host], taps: Sequence[int]) -> None:
        self.hosts = hosts
        self._taps = list(taps)
        self._random = random.Random(0)
        self._ended, self._end = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="switch", daemon=True)
        self._thread.start()

    @contextmanager
    def cut_off(self, *hosts: Host) -> Iterator[None]:
        """No frame comes from or goes to `hosts` meanwhile."""
        for host in hosts:
            host.cut = True
        try:
            yield
        finally:
            for host in hosts:
                host.cut = False

    def close(self) -> None:
        os.close(self._end)
        self._thread.join(10)
        os.close(self._ended)

    def _carry(self) -> None:
        number_of = {tap: number for number, tap in enumerate(self._taps)}
        late: list[tuple[float, int, int, bytes]] = []  # when, in which order, to whom, what
        count = 0
        while True:
            wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
            readable, _, _ = select.select([self._ended, *self._taps], [], [], wait_s)
            if self._ended in readable:
                return
            for tap in readable:
                source = number_of[tap]
                frame = os.read(tap, _FRAME_BYTES)
                for target in self._targets(frame, source):
                    ends = self.hosts[source], self.hosts[target]
                    if self._loses(*ends):
                        continue
                    count += 1
                    due = time.monotonic() + sum(host.delay_s for host in ends)
                    heapq.heappush(late, (due, count, target, frame))
            now = time.monotonic()
            while late and late[0][0] <= now:
                _, _, target, frame = heapq.heappop(late)
                try:
                    os.write(self._taps[target], frame)
                except OSError:  # its device is down: as a cable that is not plugged in
                    self.hosts[target].lost += 1

    def _targets(self, frame: bytes, source: int) -> Sequence[int]:
        if frame[0] & 1:  # broadcast or multicast
            return [number for number in range(len(self.hosts)) if number != source]
        target = frame[5]
        return [target] if frame[:5] == _MAC and target < len(self.hosts) else []

    def _loses(self, source: Host, target: Host) -> bool:
        for host in (source, target):
            if host.cut or (host.loss and self._random.random() < host.loss):
                host.lost += 1
                return True
            host.carried += 1
        return False


_MAC = bytes((2, 0, 0, 0, 0))
"""Begins the hardware addresses; the last byte is the host's number."""


@contextmanager
def network(count: int, *, outside: bool = False) -> Iterator[Network]:
    """`count` hosts on a switch; with `outside` a last one that is no namespace: the machine itself.

    Skips the test where there is none to be had.
    """
    _need_namespaces()
    unique, net = f"asyncrl-{os.getpid()}", f"10.213.{os.getpid() % 256}"
    hosts, taps = [], []
    with ExitStack() as closing:
        for number in range(count):
            host = Host(f"{net}.{number + 1}", f"{unique}-{number + 1}")
            _ip("netns", "add", host.namespace)
            closing.callback(_ip, "netns", "delete", host.namespace)
            closing.callback(_end_processes, host.namespace)
            taps.append(_tap(_device(number)))
            closing.callback(os.close, taps[-1])
            _ip("link", "set", _device(number), "netns", host.namespace, "name", "eth0")
            _bring_up(["-n", host.namespace], "eth0", host.address, number)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            hosts.append(host)
        if outside:
            hosts.append(Host(f"{net}.{count + 1}", ""))
            taps.append(_tap(_device(count)))
            closing.callback(os.close, taps[-1])
            _bring_up([], _device(count), hosts[-1].address, count)
        running = Network(hosts, taps)
        closing.callback(running.close)
        yield running


def _bring_up(where: list[str], device: str, address: str, number: int) -> None:
    mac = ":".join(f"{byte:02x}" for byte in (*_MAC, number))
    _ip(*where, "link", "set", device, "address", mac, "mtu", str(_MTU))
    _ip(*where, "addr", "add", f"{address}/24", "dev", device)
    _ip(*where, "link", "set", device, "up")


def _device(number: int) -> str:
    """The name of a device on this machine; at most 15 characters."""
    return f"asy{os.getpid()}-{number}"


def _tap(name: str) -> int:
    tap = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def _end_processes(namespace: str) -> None:
    """End the processes that a failed test left in the namespace; they notice no end, as their network is gone."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True)
    for pid in map(int, listed.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _need_namespaces() -> None:
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    if not _TUN.exists():
        pytest.skip(f"no {_TUN}")
    try:
        _ip("netns", "list")
    except FileNotFoundError:
        pytest.skip("ip (Debian: iproute2) not installed")
    probe = f"asyncrl-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    _ip("netns", "delete", probe)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
