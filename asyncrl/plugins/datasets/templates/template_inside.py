"""Program of the process that compiles and renders chat templates within limits; see `template_process`.

    python -P template_inside.py             # requests from its input, answers to its output

    request    8 bytes, little endian: length of what follows; MessagePack of a `TemplateRequest`
    answer     `HEADER`; a text in UTF-8, which may hold lone surrogates

A template is foreign code. Jinja's sandbox hides Python's objects from it, but limits neither loops nor texts, some of
which are made while it compiles. So the kernel limits the process's address space and the CPU time of each request, and
kills the process beyond that.
"""

from __future__ import annotations

import functools
import json
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any

import jinja2
import msgspec
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct("<Q")
"""Header of a request: its length."""
HEADER = struct.Struct("<cQ")
"""Header of an answer: its kind, and the length of the text that follows."""
RENDERED, REFUSED, NO_TEMPLATE, TOO_LARGE = b"r", b"f", b"n", b"l"


class TemplateRequest(msgspec.Struct, frozen=True):
    """Render the template `source` with `variables` at the local time `now`; without variables only compile it."""

    source: str
    variables: dict[str, Any] | None
    now: datetime


def main(cpu_s: float, memory_bytes: int, text_chars: int) -> None:
    """Answer requests until the input ends."""
    for interrupt in (signal.SIGINT, signal.SIGTERM):  # the parent process ends this one
        signal.signal(interrupt, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decoder = msgspec.msgpack.Decoder(TemplateRequest)
    while length := sys.stdin.buffer.read(LENGTH.size):
        request = decoder.decode(sys.stdin.buffer.read(*LENGTH.unpack(length)))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        kind, text = _answer(request, text_chars)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(HEADER.pack(kind, len(text)))
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()


def _answer(request: TemplateRequest, text_chars: int) -> tuple[bytes, bytes]:
    """Return the kind and text of the answer to `request`."""
    try:
        try:
            template = _compiled(request.source)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            return NO_TEMPLATE, _encoded(str(error))
        if request.variables is None:
            return RENDERED, b""
        try:
            text = template.render({"strftime_now": request.now.strftime, **request.variables})
        except MemoryError:
            raise
        except Exception as error:
            return REFUSED, _encoded(f"{type(error).__name__}: {error}")
        return (RENDERED, _encoded(text)) if len(text) <= text_chars else (TOO_LARGE, b"")
    except MemoryError:
        return TOO_LARGE, b""


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for programs that need a mask; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["dict"] = lambda *args, **kwargs: dict(
        *args, **kwargs
    )  # the type itself would give access to more of Python
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert a value to JSON without escaping HTML, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
