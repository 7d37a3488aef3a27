"""Whatever comes from outside a process is decoded, or refused by the error that its decoder names: never another one.

The table has each decoder with messages that it takes and the errors that it may raise. Its inputs are those messages,
damaged by one to four changes, each drawn from

    bytes       flip one, cut out, repeat, cut off, insert what is awkward, splice with another message
    structure   (JSON and MessagePack) an awkward value in the place of any value, a key renamed or repeated

The changes to the structure get past the syntax, to where values are judged. Every input takes a bounded time, of this
process alone, so that other load does not matter; and the largest may not blow up memory (`MAX_GROWTH_BYTES`).

`ASYNCRL_FUZZ_INPUTS`: how many inputs for each decoder; `ASYNCRL_FUZZ_SEED`: which. `tests/stress/fuzz.py` tries many.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import asyncrl.rollout.messages
import asyncrl.trainer.messages
from asyncrl.api import Sample, Trajectory
from asyncrl.chat.parsers import FORMATS, parser
from asyncrl.comm import ended_rollouts as lines
from asyncrl.comm import names, push_pull, request_reply
from asyncrl.comm.http_client import HttpMalformed, decoded_reply
from asyncrl.comm.http_server import Refused
from asyncrl.comm.name_files import FileResolver
from asyncrl.comm.name_resolve import NameResolveError
from asyncrl.comm.trajectory_codec import CodecError, decode_each, decode_trajectories, encode_trajectories
from asyncrl.data.datasets import DataRecord
from asyncrl.data.files import read as read_records
from asyncrl.data.prompt_queue import DataOrder, UsedPrompts
from asyncrl.inference import http_calls as embedded
from asyncrl.inference import messages as serving
from asyncrl.inference.engine_io import RequestError
from asyncrl.inference.openai import anthropic, chat_completions, responses
from asyncrl.inference.openai.api_call import ApiError
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.rollout_state import Ledger
from asyncrl.manager.service import ManagerService, answering
from asyncrl.observe.tail import read_rows
from asyncrl.rollout.user_code_pool import child as user_code
from asyncrl.runtime.trials.resume import newest_progress
from asyncrl.trainer.messages import RolloutRecord
from asyncrl.trainer.rank.inbox_store import InboxStore, StoredTrajectoryDamaged
from asyncrl.verify.audit.ledger_files import read_ledger, surviving
from asyncrl.verify.audit.ledger_rules import Replay
from asyncrl.weights.manifest import FileEntry, Manifest, ManifestError, TensorEntry, read_manifest

INPUTS = int(os.environ.get("ASYNCRL_FUZZ_INPUTS", "120"))
SEED = int(os.environ.get("ASYNCRL_FUZZ_SEED", "0"))
MAX_CPU_S = 5.0
"""For one input of some kilobytes; what is bounded takes milliseconds."""
MAX_GROWTH_BYTES = 256 << 20
MAX_ROOM_BYTES = 2 << 30
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
AWKWARD_BYTES = (
    b"\xff",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\x00",
    b"\\ud800",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-1",
    b"9" * 400,
    b"null",
    b"[" * 3000,
    b'{"a":' * 3000,
    b'"',
    b"\n",
    b"\xdf\xff\xff\xff\xff",  # MessagePack: a map, a list, bytes and text of 4 GB
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x91" * 3000,
    b"\xcf" + b"\xff" * 8,
    b"\xff\xff\xff\x7f",
    b"<tool_call>",
    b"</tool_call>",
    b"<function=",
    b"<parameter=",
    b"<think>",
    b"```",
)
DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]
AWKWARD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    1e308,
    5e-324,
    -0.0,
    "",
    "x" * 5000,
    "../../etc/passwd",
    "\x00",
    "e0-99999999999999999999",
    "[" * 20_000,
    '{"a":' * 5000,
    "\udbff".encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
    [],
    {},
    [None],
    [[]],
    {"": None},
    {"type": "text"},
    DEEP,
)
CHANGES = 4


def mutant(valid: Sequence[bytes], chance: random.Random) -> bytes:
    """One of the `valid` messages, damaged."""
    data = chance.choice(valid)
    for _ in range(chance.randint(1, CHANGES)):
        data = _structure(data, chance) if chance.random() < 0.5 else _bytes(data, valid, chance)
    return data


def _bytes(data: bytes, valid: Sequence[bytes], chance: random.Random) -> bytes:
    at, to = sorted(chance.randint(0, len(data)) for _ in range(2))
    match chance.randrange(7):
        case 0 if data:
            at = chance.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at] + data[to:]
        case 2:
            return data[:to] + data[at : min(to, at + 2000)] + data[to:]
        case 3:
            return data[:at]
        case 4 | 5:
            return data[:at] + chance.choice(AWKWARD_BYTES) + data[to if chance.random() < 0.5 else at :]
        case _:
            other = chance.choice(valid)
            return data[:at] + other[chance.randint(0, len(other)) :]


def _structure(data: bytes, chance: random.Random) -> bytes:
    """`data` with one value replaced, where it is JSON or MessagePack, or lines of JSON."""
    lines = data.split(b"\n")
    index = chance.randrange(len(lines))
    try:
        if lines[index][:1] in (b"{", b"["):
            lines[index] = json.dumps(_replaced(json.loads(lines[index]), chance)).encode("utf-8", "surrogatepass")
            return b"\n".join(lines)
        return msgspec.msgpack.encode(_replaced(msgspec.msgpack.decode(data), chance))
    except (ValueError, RecursionError, TypeError, msgspec.MsgspecError, UnicodeError, OverflowError):
        return data  # it is neither, or is damaged already


def _replaced(value: Any, chance: random.Random) -> Any:
    """`value` with an awkward one somewhere within."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        if chance.random() < 0.15:
            return {chance.choice(("", "x", key)): value[key], **value}
        return value | {key: _replaced(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        at = chance.randrange(len(value))
        return [*value[:at], _replaced(value[at], chance), *value[at + 1 :]]
    if chance.random() < 0.05:
        return chance.choice((float("nan"), float("inf")))
    return chance.choice(AWKWARD_VALUES)


@dataclass(frozen=True)
class Case:
    """A decoder, what it takes, and the errors that it names."""

    name: str
    decode: Callable[[bytes], Any]
    valid: Sequence[bytes]
    allowed: tuple[type[Exception], ...] = ()


def in_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    """`read` of the folder in which a file `name` has the input."""

    def decode(data: bytes) -> Any:
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            file = Path(folder) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            return read(Path(folder))

    return decode


def of_frames(decode: Callable[[list[bytes]], Any]) -> Callable[[bytes], Any]:
    """A decoder of two frames, of one input: where they are parted stands at its beginning."""

    def parted(data: bytes) -> Any:
        at = int.from_bytes(data[:2], "little")
        return decode([data[2 : 2 + at], data[2 + at :]])

    return parted


def as_frames(frames: Sequence[Any]) -> bytes:
    first, second = map(bytes, frames)
    return len(first).to_bytes(2, "little") + first + second


def run(call: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


def as_text(data: bytes) -> str:
    """Return the text of `data` as a file opened as text may hold it."""
    return data.decode(errors="replace")


def trajectory(name: str = "r1", samples: int = 2) -> Trajectory:
    group = [
        Sample(
            tokens=np.array([5, 6, 7, 8], np.int32),
            loss_mask=np.array([0, 0, 1, 1], np.uint8),
            behave_logprobs=np.array([0, 0, -0.5, -0.25], np.float32),
            versions=np.array([-1, -1, 3, 4], np.int32),
            reward=1.0,
            truncated=False,
            episode=number,
            token_rewards=np.array([0, 0, 0.5, 0], np.float32),
            reward_parts={"format": 0.5},
            metrics={"turns": 2.0},
        )
        for number in range(samples)
    ]
    return Trajectory(name, "e0-1", 1, group, {"time": 0.5})


RECORD = RolloutRecord("r1", "e0-1", 1, 0, 3, {3: 2}, (4, 4), (2, 2), (1.0, 0.0), (False, True), (0, 1), {"time": 0.5})
MINUTE = {"timeout_s": 0.0}
ORDER = DataOrder(10, 0)
WHO: dict[str, Any] = {"worker": "rollout_worker/0", "incarnation": 0, "released": ["q"], "finished": []}
MANIFEST = Manifest("actor", 3, {"f": FileEntry(1, "crc")}, {"w": TensorEntry((2, 2), "F32", "f")})
FINISHED = m.FinishedRollout("r1", True, success=0.5)
GRANTED = m.GrantedRollout("r1", "e0-1", 1, 1, 0, 0, 3)
RECEIVED = m.ReceivedRollout("r1", "e0-1", 1, 3, 8)
TRAINED = m.TrainedRollout("r1", "e0-1", 1, {3: 2}, 2, 2, 0.5, {"past": (1, 2)}, {"actor": lines.PolicyTokens(2, 2, 2)})
CHECKPOINT = m.GateCheckpoint(
    used=UsedPrompts(["e0-1", "own"]).to_json(),
    dropped={"stale": 1},
    retries=[(1, 2, 3)],
    curriculum=[[1, 0, 0.5]],
    line=3,
)
REQUESTS: list[m.Message] = [
    m.AllocateRequest(**WHO, rollouts=["r1"], **MINUTE),
    m.ScheduleRequest(**WHO, requests=[m.RouteRequest(1, 2, 3, request_id="q", rollout_id="r1")], **MINUTE),
    m.LostServersRequest(**WHO, after=-1, **MINUTE),
    m.FinishRequest(worker="rollout_worker/0", finished=[FINISHED]),
    m.ReceivedReport([RECEIVED], manager=1),
    m.ConsumedReport(1, [TRAINED], [m.DroppedRollout("r2", "stale")], manager=1),
    m.CloseGate(manager=1),
    m.EndReport(1, manager=1),
    m.HeldReport("rollout_worker/0", 1, [m.HeldRollout(GRANTED), m.HeldRollout(GRANTED, FINISHED)]),
    m.RunBegin(1, CHECKPOINT, [RECEIVED]),
    m.WaitExpiringRequest(1, 0.0),
]
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "2+2"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": ["integer", "null"]}, "b": {"type": "object"}}},
    },
}
ANTHROPIC = {
    "model": "policy",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "4"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}],
}
RESPONSES = {
    "model": "policy",
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "2+2"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ],
    "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}],
}
SAMPLING = {
    "max_new_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "stop": ["x"],
    "n": 2,
    "sampling_seed": 7,
}


def js(value: Any) -> bytes:
    return msgspec.json.encode(value)


def ledger_bytes() -> bytes:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        folder = Path(name) / "ledger"
        ledger = Ledger(folder, lines.RunSettings(1, 1, "drop", 1, 0), now=lambda: 1000.0)
        counts = lines.RolloutCounts(1, 0, {"stale": 1})
        ledger.begin(0, m.GateCheckpoint())
        for line in (
            lines.Admitted("r1", "e0-1", 1, 0, "rollout_worker/0", 0, 1000.0),
            lines.Finished("r1", 8, 1000.0),
            lines.Dropped("r0", "stale", lines.PromptFate.returned, 1000.0),
            lines.Abandoned("r0", 1000.0),
        ):
            ledger.add(line)
        ledger.step(1, [TRAINED], counts)
        ledger.end(1, counts)
        ledger.close()
        return (folder / "000001.jsonl").read_bytes()


def audit(folder: Path) -> None:
    def report(place: str, what: str) -> None:
        assert place
        assert what

    Replay(7, report).run(surviving(read_ledger(folder, report), report))


def manager_cases() -> Iterator[Case]:
    service = ManagerService(batch_size=1, max_staleness=1, routing="round_robin", lease_s=1.0, order=ORDER)
    service.begin(m.RunBegin())
    for path, (kind, _) in service.methods().items():

        async def take(request: Any) -> m.Message:
            return m.Done()

        valid = [js(request) for request in REQUESTS if type(request) is kind]
        assert valid, path
        answer = answering((kind, take))
        yield Case(f"manager{path}", lambda data, answer=answer: run(answer(None, data)), valid, (Refused,))


def decode_call(kind: type[msgspec.Struct], frames: list[bytes]) -> Any:
    _, _, encoded = request_reply.unpack([memoryview(frame) for frame in frames])
    return request_reply.decode(encoded, kind)


def call_cases() -> Iterator[Case]:
    """Every call between processes, and every reply."""
    state = {"version": 3, "gate": msgspec.to_builtins(CHECKPOINT)}
    trainer, rollout = asyncrl.trainer.messages, asyncrl.rollout.messages
    bodies = [
        trainer.PolledBuffer(1, (RECORD,)),
        trainer.PollBuffer(1, 0.0),
        trainer.Discard(("r1",)),
        trainer.SendWeights(0, "https://h:1", 3, True, 5.0),
        trainer.BeginStep(3, 2, 1, ("r1",), ((0,),), (trainer.GridShare(("r1",), ((0,),), (0,), ((0,),)), None)),
        trainer.CallStats({"loss": [0.5, 1.0]}),
        trainer.RunCall("actor", "actor", "train", ("a",), ("b",), {"x": 1}),
        trainer.MoveColumns(("a",), "actor", "critic"),
        trainer.Publish("actor", 3, True),
        trainer.PublishedWeights("/x"),
        trainer.CollectWeights("actor", (3,)),
        trainer.SaveCheckpoint("/x", 3, state),
        trainer.CommitCheckpoint("/x", {"f": FileEntry(1, "crc")}, 2, (1,)),
        trainer.WrittenShare({"f": FileEntry(1, "crc")}),
        trainer.LoadCheckpoint("/x"),
        trainer.LoadedCheckpoint(state),
        request_reply.Failure.of(ValueError("x")),
        request_reply.Done(),
        rollout.Evaluate("test", 3),
    ]
    for body in bodies:
        kind, valid = type(body), [as_frames(request_reply.pack(7, "verb", body))]
        yield Case(f"call {kind.__name__}", of_frames(partial(decode_call, kind)), valid, (request_reply.MessageError,))


def decode_name(kind: Any, data: bytes) -> Any:
    return kind.decode(as_text(data))


def name_cases() -> Iterator[Case]:
    entries = [
        names.TrialHolder("l", "h", "m", 1, 2, "now", "/x"),
        names.WorkerAddress("tcp://h:1", 1),
        names.WorkerStatus("ready", 1, "why", 2),
        names.GenerationServerEntry("http://h:1", None, 3),
        names.PublishedVersion(3, "/x"),
    ]
    for entry in entries:
        kind = type(entry)
        yield Case(f"name {kind.__name__}", partial(decode_name, kind), [js(entry)], (ValueError,))


def resolver_entry(folder: Path) -> Any:
    return FileResolver(folder, patience_s=0.0).get("a")


def checkpoint_bytes() -> bytes:
    return js({"roles": {}, "master_state": {"version": 3, "gate": msgspec.to_builtins(CHECKPOINT)}})


def kept_inbox(folder: Path) -> Any:
    return list(InboxStore(folder).read())


def cases() -> Iterator[Case]:
    frames = as_frames(encode_trajectories([trajectory(), trajectory("r2", 1)]))
    yield Case("trajectories", of_frames(decode_trajectories), [frames], (CodecError,))
    yield Case("trajectories, each", of_frames(decode_each), [frames], (CodecError,))
    yield Case("numbers of trajectories", push_pull.decode_numbers, [push_pull.encode([1, 2**40])], (CodecError,))
    replies = [push_pull.encode(push_pull.Accepted([1, 2])), push_pull.encode(push_pull.Refused([1], "why"))]
    yield Case("reply of a puller", push_pull.decode_reply, replies, (CodecError,))
    yield from call_cases()
    yield from manager_cases()
    yield from name_cases()
    reported = [js(m.ConsumedReply(lines.RolloutCounts(1, 0, {"stale": 1}), CHECKPOINT, 0.5, [3]))]

    def reply(data: bytes) -> Any:
        return decoded_reply("http://h", 200, data, m.ConsumedReply)

    def any_reply(data: bytes) -> Any:
        return decoded_reply("http://h", 200, data, None)

    yield Case("reply of the manager", reply, reported, (HttpMalformed,))
    yield Case("reply of a server", any_reply, reported, (HttpMalformed,))
    stored = js({"value": "x", "owner": "me", "lease_s": None})
    yield Case("entry of a name", in_file("a.json", resolver_entry), [stored], (NameResolveError,))
    yield Case("manifest", in_file("manifest.json", read_manifest), [js(MANIFEST)], (ManifestError,))
    yield Case("checkpoint's state", in_file("checkpoints/v3/state.json", newest_progress), [checkpoint_bytes()])
    used = js(UsedPrompts(["e0-1", "e3-70", "own"]).to_json())
    yield Case(
        "used prompts", lambda data: UsedPrompts.from_json(json.loads(data)), [used], (ValueError, RecursionError)
    )
    yield Case("ledger", in_file("000001.jsonl", audit), [ledger_bytes()])
    yield Case(
        "metrics", in_file("rows", lambda folder: read_rows(folder / "rows")), [b'{"step": 1}\n{}\n'], (ValueError,)
    )
    record = js(DataRecord(3, "AAAA"))
    yield Case("data record", in_file("r", lambda folder: DataRecord.read(folder / "r")), [record], (ValueError,))
    with tempfile.TemporaryDirectory() as inbox:
        InboxStore(Path(inbox)).write(trajectory())
        kept = (Path(inbox) / "1").read_bytes()
    yield Case("kept trajectory", in_file("1", kept_inbox), [kept], (StoredTrajectoryDamaged,))
    rows = b'{"prompt": "2+2", "answer": "4"}\n{"messages": [{"role": "user", "content": "x"}]}\n'
    yield Case("JSON lines", in_file("d.jsonl", lambda folder: read_records(folder / "d.jsonl")), [rows], (ValueError,))
    generate = [
        js({"input_ids": [1, 2], "sampling_params": SAMPLING, "rid": "a", "return_logprob": True}),
        js({"input_ids": [[1], [2]], "sampling_params": [SAMPLING, SAMPLING | {"n": 2}], "rid": ["a", "b"]}),
    ]

    def parse_generate(data: bytes) -> Any:
        return embedded.parse_generate(data, None, (2,))

    yield Case("/generate", parse_generate, generate, (embedded.Refusal, RequestError))
    bodies: list[Any] = [
        serving.PauseRequest("abort"),
        serving.ContinueRequest(),
        serving.AbortRequest("a", True),
        {"model_path": "/x", "weight_version": "3"},
    ]
    kinds = [serving.PauseRequest, serving.ContinueRequest, serving.AbortRequest, serving.UpdateWeightsRequest]
    for body, kind in zip(bodies, kinds, strict=True):

        def order(data: bytes, kind: Any = kind) -> Any:
            return embedded.decode(data, kind)

        yield Case(f"server {kind.__name__}", order, [js(body)], (embedded.Refusal,))
    chat = {"model": "policy", "messages": CHAT, "tools": [TOOL], "max_tokens": 5, "stop": ["x"], "n": 2, "seed": 1}
    yield Case("/chat/completions", chat_completions.ChatCompletions().read, [js(chat)], (ApiError,))
    yield Case("/messages", anthropic.Messages().read, [js(ANTHROPIC)], (ApiError,))
    count = {key: ANTHROPIC[key] for key in ("model", "messages", "tools")}
    yield Case("/messages/count_tokens", anthropic.read_count, [js(count)], (ApiError,))
    yield Case("/responses", responses.Responses().read, [js(RESPONSES)], (ApiError,))
    yield Case("/tokenize", chat_completions.read_tokenize, [js({"messages": CHAT, "tools": [TOOL]})], (ApiError,))
    ids = chat_completions.ChatFromTokens(lambda messages, *, tools=(): (1, 2))
    yield Case("/chat/completions/tokens", ids.read, [js(chat | {"tokens": [1, 2]})], (ApiError,))
    schemas = chat_completions.tools_of([TOOL])
    calls = [
        b'<think>a</think>b<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        b"x<function=f><parameter=a>1</parameter><parameter=b>{}</parameter></function>",
        b'<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}',
        b'```json\n[{"name": "f", "arguments": {"a": [1, {}]}}]\n```',
    ]
    for name in FORMATS:

        def parse(data: bytes, name: str = name) -> Any:
            return parser(name).parse(as_text(data), schemas)

        yield Case(f"calls, {name}", parse, calls)
    child = [
        msgspec.msgpack.encode(user_code.ChildReply(value={"reward": 1.0})),
        msgspec.msgpack.encode(user_code.ChildReply(error="x")),
    ]
    yield Case("reply of a user's process", user_code.decode_reply, child, (ValueError,))


CASES = list(cases())


@pytest.fixture(scope="module", autouse=True)
def _clean() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_ROOM_BYTES, before[1]))  # else the machine's memory is the limit
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_valid_is_taken(case: Case) -> None:
    for data in case.valid:
        case.decode(data)


def with_value(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    return data.replace(old, new, 1)


DEEP_JSON, NO_TEXT = b"[" * 3000, b"\xff"
FOUND: list[tuple[str, bytes]] = [
    ("reply of a server", DEEP_JSON),
    ("reply of a user's process", b"\x81\xa5value" + b"\x91" * 3000),
    ("manifest", with_value(js(MANIFEST), b"actor", NO_TEXT)),
    ("checkpoint's state", b'{"master_state": 5}'),
    ("used prompts", b'"x"'),
    ("used prompts", DEEP_JSON),
    ("used prompts", b'{"used_prompts": {"count": 0, "others": [], "epochs": {"0": "AAAA"}}}'),
    ("ledger", with_value(ledger_bytes(), b"stale", NO_TEXT)),
    ("ledger", with_value(ledger_bytes(), b'"attempt":0', b'"attempt":-1')),
    ("ledger", with_value(ledger_bytes(), b'"order":1', b'"order":4611686018427387905')),  # took all memory there is
    ("ledger", with_value(ledger_bytes(), b'"seed":0', b'"seed":-1')),
    ("metrics", DEEP_JSON + b"\n"),
    ("JSON lines", DEEP_JSON + b"\n"),
    ("/chat/completions", with_value(js({"model": "policy", "messages": CHAT}), b'{\\"a\\": 1}', DEEP_JSON)),
]
"""Inputs that once ended in another error."""


@pytest.mark.parametrize(("name", "data"), FOUND, ids=[f"{name}-{number}" for number, (name, _) in enumerate(FOUND)])
def test_what_was_found_once_is_refused_by_name(name: str, data: bytes) -> None:
    (case,) = (case for case in CASES if case.name == name)
    with contextlib.suppress(*case.allowed):
        case.decode(data)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_damaged_message_is_taken_or_refused_by_name(case: Case) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(INPUTS):
        data = mutant(case.valid, random.Random(f"{SEED} {case.name} {number}"))
        begun = time.process_time()
        try:
            case.decode(data)
        except case.allowed:
            pass
        except Exception as error:
            raise AssertionError(f"input {number} of seed {SEED} ({data[:200]!r}): {error!r:.300}") from error
        took = time.process_time() - begun
        assert took < MAX_CPU_S, f"input {number} of seed {SEED} took {took:.1f} s"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < MAX_GROWTH_BYTES, f"{grown >> 20} MB more"
