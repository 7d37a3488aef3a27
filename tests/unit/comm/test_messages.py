"""Every message type of the packages comes back from the wire as it was sent, and is named after what it asks for."""

from __future__ import annotations

from functools import reduce
from operator import or_
from types import UnionType
from typing import Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncrl.rollout.messages
import asyncrl.trainer.messages
from asyncrl.comm import request_reply
from asyncrl.comm.request_reply import Failure, MessageError, Reply, Request, decode, encode
from asyncrl.trainer.messages import BeginStep, GridShare, PollBuffer
from tests.examples import examples

LIMIT = 1 << 20
PACKAGES = (asyncrl.trainer.messages, asyncrl.rollout.messages)
TYPES = [
    kind
    for package in PACKAGES
    for kind in vars(package).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == package.__name__
]
SCALARS = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(),
    type(None): st.none(),
}
PLAIN = st.recursive(
    reduce(or_, SCALARS.values()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field annotated `hint`."""
    parts = [PLAIN if part is Any else values_of(part) for part in get_args(hint) if part is not Ellipsis]
    if get_origin(hint) is tuple:
        return st.lists(parts[0]).map(tuple)
    if get_origin(hint) is dict:
        return st.dictionaries(*parts)
    if isinstance(hint, UnionType):
        return st.one_of(parts)
    if issubclass(hint, msgspec.Struct):
        return st.builds(hint, **{field.name: values_of(field.type) for field in msgspec.structs.fields(hint)})
    return SCALARS[hint]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_a_message_comes_back_as_it_was_sent(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    sent = data.draw(values_of(kind))
    assert decode(memoryview(encode(sent)), kind) == sent


def test_every_call_is_named_after_its_type_and_knows_its_reply() -> None:
    calls = [kind for kind in TYPES if issubclass(kind, Request)]
    assert {"poll_buffer", "begin_step", "run_call", "evaluate"} <= {call.method for call in calls}
    assert len({call.method for call in calls}) == len(calls)
    assert all(issubclass(call.reply_type, Reply) for call in calls)
    assert PollBuffer.reply_type is asyncrl.trainer.messages.PolledBuffer


def test_a_wrong_field_deep_inside_is_named_with_its_path() -> None:
    share = GridShare(("a", "b"), ((0,), (0,)), (0, "one"), ((0, 0),))  # type: ignore[arg-type]
    step = BeginStep(0, 0, 1, (), ((),), (None, share))
    with pytest.raises(MessageError, match=r"BeginStep: Expected `int`, got `str` - at `\$.shares\[1\].sources\[1\]`"):
        decode(memoryview(encode(step)), BeginStep)


def test_a_failure_has_a_bounded_traceback() -> None:
    failure = Failure.of(ValueError("x" * 10**6))
    assert failure.kind == "ValueError"
    assert len(encode(failure)) < 10**5


def test_a_body_over_the_limit_is_not_sent_and_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = memoryview(encode(PollBuffer(0, 0.0)))
    monkeypatch.setattr(request_reply, "MAX_BYTES", 5)
    with pytest.raises(MessageError, match=f"PollBuffer takes {len(encoded)} bytes, limit 5"):
        encode(PollBuffer(0, 0.0))
    with pytest.raises(MessageError, match=f"PollBuffer of {len(encoded)} bytes is over the limit of 5"):
        decode(encoded, PollBuffer)
