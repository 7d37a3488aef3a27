"""Represent one process that Ray runs elsewhere: connect standard input and output to the Ray driver.

    python -I -S ray_carrier.py SOCKET REQUEST

SOCKET is the driver's listening socket (`asyncrl.runtime.hosts.ray_driver`), REQUEST a `ProcessRequest` as JSON. This
program exits with the code that the driver reports, or with 255 if the driver ends first. Run this file by path: it
imports the standard library only, so that a thousand of these processes stay small.
"""

from __future__ import annotations

import os
import socket
import sys

_LOST = 255  # asyncrl.runtime.exit_codes.EXIT_LOST; nothing of asyncrl can be imported here


def main(path: str, request: str) -> int:
    """Carry one process of the Ray driver until it ends; return its exit code."""
    with socket.socket(socket.AF_UNIX) as driver:
        try:
            driver.connect(path)
            socket.send_fds(driver, [request.encode()], [0, 1])
            told = driver.recv(16)
        except OSError as error:
            print(f"the Ray driver cannot be reached: {error}", flush=True)
            return _LOST
    if not told:
        print("the Ray driver has ended", flush=True)
    return int(told) if told else _LOST


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
