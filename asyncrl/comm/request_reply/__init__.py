"""Calls from one process to another, for example from the master to its workers.

A client holds one connection to one server and may have many calls outstanding; requests arrive in the order of the
calls. The connections of many clients may share one socket (`PeerRouter`). The server's I/O runs in a separate thread,
and its handlers are of two kinds:

- `immediate`: an async function on the I/O thread's loop. It answers while the main thread computes (heartbeats,
  metadata), and it may wait (long polls). Immediate calls start in order of arrival and may end in any order.
- `queued`: a plain function that the main thread runs with `serve_one`, strictly in order of arrival over all clients:
  work on the device.

Requests and replies are types (`messages.py`), checked where they arrive. A call is never sent twice. On a broken
connection every outstanding call raises PeerGone, and the caller decides whether to repeat it.
"""

from asyncrl.comm.request_reply.client import PeerGone, RemoteError, RequestClient, RequestTimeout
from asyncrl.comm.request_reply.messages import Done, MessageError, Reply, Request
from asyncrl.comm.request_reply.server import RequestServer

__all__ = [
    "Done",
    "MessageError",
    "PeerGone",
    "RemoteError",
    "Reply",
    "Request",
    "RequestClient",
    "RequestServer",
    "RequestTimeout",
]
