"""Types may be decoded by several threads at once, also for the first time."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from asyncrl.comm.typed import convert, decode_json, json_decoder, msgpack_decoder

ROOT = Path(__file__).parents[3]
THREADS = """
import sys, threading
import msgspec
from asyncrl.comm.typed import convert, decode_json, msgpack_decoder

sys.setswitchinterval(1e-6)
data = b'{"a":1,"parts":[{"x":1,"y":[1,2]}],"b":2}'
plain = msgspec.json.decode(data)
for _ in range(300):
    part = msgspec.defstruct("Part", [("x", int), ("y", list[int])])
    whole = msgspec.defstruct("Whole", [("a", int), ("parts", list[part]), ("b", int)])
    ways = [
        lambda: decode_json(data, whole),
        lambda: convert(plain, whole),
        lambda: msgpack_decoder(list[part]).decode(msgspec.msgpack.encode(plain["parts"])),
        lambda: convert(plain["parts"], list[part]),
    ]
    threads = [threading.Thread(target=way) for way in ways]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_threads_that_decode_a_type_for_the_first_time_at_once_do_not_end_the_process() -> None:
    """With msgspec alone they end it by SIGSEGV, mostly within the first hundred types."""
    ended = subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")


MAKES_DECODERS = ("msgspec.json.Decoder", "msgspec.msgpack.Decoder", "msgspec.convert")
DECODES = ("msgspec.json.decode", "msgspec.msgpack.decode")


def uses(file: Path) -> list[str]:
    """The calls in `file` that decode into a type, or convert into one, without the lock."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    into_types = [call for call in calls if any(keyword.arg == "type" for keyword in call.keywords)]
    names = [(ast.unparse(call.func), call) for call in calls]
    return [name for name, call in names if name in MAKES_DECODERS or (name in DECODES and call in into_types)]


def test_nothing_else_decodes_into_types() -> None:
    own = {"comm/typed.py"}
    files = sorted((ROOT / "asyncrl").rglob("*.py"))
    found = {str(file.relative_to(ROOT / "asyncrl")): uses(file) for file in files}
    assert {file for file, calls in found.items() if calls} == own


class Point(msgspec.Struct):
    x: int
    names: dict[int, str] = {}


def test_what_is_decoded_and_converted_is_what_msgspec_gives() -> None:
    assert decode_json(b'{"x": 3}', Point) == convert({"x": 3}, Point) == Point(3)
    assert convert({"x": 3, "names": {"1": "a"}}, Point, str_keys=True) == Point(3, {1: "a"})
    assert msgpack_decoder(Point).decode(msgspec.msgpack.encode(Point(3))) == Point(3)
    assert json_decoder(Point) is json_decoder(Point)
    with pytest.raises(msgspec.ValidationError, match="Expected `int`, got `str`"):
        decode_json(b'{"x": "3"}', Point)
    with pytest.raises(msgspec.ValidationError, match="missing required field `x`"):
        convert({}, Point)
