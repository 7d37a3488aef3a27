"""The manager's verbs over HTTP: JSON in and out, one small handler for everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from asyncrl.comm.http_server import Handler, HttpServer, Refused, Route, json_response
from asyncrl.comm.security import HttpSecurity
from asyncrl.manager.messages import BadRequest, Verb

MAX_BODY_BYTES = 16 * 2**20
"""A call for ten thousand requests is under two megabytes; more than this is not one of this system's."""


class ManagerHttp(HttpServer):
    """The server.

    Args:
        verbs: by path, the type of the request and what answers it.
        security: the token of every verb, and TLS; None where the run has no secret.
        registry: what `/metrics` shows, to anybody.
    """

    def __init__(
        self, verbs: Mapping[str, Verb], *, security: HttpSecurity | None, registry: CollectorRegistry
    ) -> None:
        async def health(request: web.BaseRequest, body: bytes) -> web.Response:
            return json_response({"status": "ok"})

        async def metrics(request: web.BaseRequest, body: bytes) -> web.Response:
            return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        routes = {path: Route(answering(verb), max_bytes=MAX_BODY_BYTES) for path, verb in verbs.items()}
        routes |= {"/health": Route(health, open=True), "/metrics": Route(metrics, open=True)}
        token, tls = (None, None) if security is None else (security.token, security.server_context())
        super().__init__(routes, token=token, tls=tls, registry=registry)


def answering(verb: Verb) -> Handler:
    """What answers requests of the verb; what is no such request is `Refused`."""
    kind, handler = verb
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)

    async def answer(request: web.BaseRequest, body: bytes) -> web.Response:
        try:
            return json_response(await handler(decoder.decode(body or b"{}")))
        except msgspec.ValidationError as error:
            raise _malformed(_with_path_first(str(error))) from error
        except (BadRequest, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _malformed(str(error)) from error

    return answer


def _malformed(message: str) -> Refused:
    return Refused(400, {"error": message}, "malformed")


def _with_path_first(message: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.order`" as "$.order: expected int, got str"."""
    what, _, path = message.replace("`", "").partition(" - at ")
    return f"{path or '$'}: {what[:1].lower()}{what[1:]}"
