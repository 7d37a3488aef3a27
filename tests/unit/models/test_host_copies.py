"""Copies to the host run beside the device's work, and neither a reader nor a writer comes before they have ended."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

import pytest
import torch
from torch import Tensor

from asyncrl.models.host_copies import HostCopies, Pair, host_like

from ...late_stream import LateStream


@pytest.fixture
def stream() -> LateStream:
    return LateStream()


def test_what_changes_the_source_after_it_has_waited_does_not_change_the_copy(stream: LateStream) -> None:
    copies, source = stream.copies(), torch.ones(3)
    early, late = host_like(source).zero_(), host_like(source).zero_()
    copies.begin([(early, source)]).wait_on_device()
    begun = copies.begin([(late, source)])
    assert late.tolist() == [0.0] * 3, "the thread goes on before the copy is made"
    source.fill_(7.0)
    begun.wait()
    assert early.tolist() == [1.0] * 3
    assert late.tolist() == [7.0] * 3, "nobody waited before the change"


def test_tensors_that_share_a_buffer_come_one_after_the_other_with_their_own_values(stream: LateStream) -> None:
    buffer, asked = torch.empty(2), []

    def one_by_one() -> Iterator[tuple[str, Tensor]]:
        for number in range(4):
            asked.append(number)
            yield f"t{number}", buffer.fill_(float(number))

    found = stream.copies().each(one_by_one())
    first = next(found)
    assert asked == [0, 1], "one is copied while the one before is used"
    values = [(name, tensor.tolist()) for name, tensor in (first, *found)]
    assert values == [(f"t{number}", [float(number)] * 2) for number in range(4)]
    assert stream.waits.count("device") == 4, "the buffer is filled again only after its copy"


def test_without_a_stream_a_copy_is_made_at_once_and_tensors_pass_as_they_are() -> None:
    copies, source = HostCopies(), torch.ones(2)
    host = host_like(source).zero_()
    begun = copies.begin([(host, source)])
    source.zero_()
    begun.wait_on_device()
    begun.wait()
    assert host.tolist() == [1.0, 1.0]
    ((_, passed),) = copies.each([("t", source)])
    assert passed is source


def three_pairs() -> list[Pair]:
    """Of 4 bytes, of 10, which are cut, and of 12 that are not contiguous."""
    sources = [torch.arange(1, 1 + size, dtype=torch.uint8) for size in (4, 10, 12)]
    sources[-1] = sources[-1].view(3, 4).t()
    return [(host_like(source).zero_(), source) for source in sources]


def test_of_a_copy_in_pieces_one_is_queued_at_a_time_by_the_thread_that_waits(stream: LateStream) -> None:
    pairs = three_pairs()
    copy = stream.copies(piece_bytes=5).begin_in_pieces(pairs)
    assert not stream.queued
    copy.wait()
    assert all(torch.equal(target, source) for target, source in pairs)
    assert stream.waits == ["host"] * 4
    assert stream.most_queued_bytes == 12, "what cannot be cut"


@pytest.mark.parametrize("by_stream", [True, False], ids=["stream", "no stream"])
def test_what_changes_the_sources_has_all_pieces_copied_first(stream: LateStream, by_stream: bool) -> None:
    pairs = three_pairs()
    expected = [source.clone() for _, source in pairs]
    copy = (stream.copies(piece_bytes=5) if by_stream else HostCopies(piece_bytes=5)).begin_in_pieces(pairs)
    stream.release.clear()
    waiting = Thread(target=copy.wait)
    waiting.start()
    copy.wait_on_device()
    for _, source in pairs:
        source.zero_()
    stream.release.set()
    waiting.join()
    assert all(torch.equal(target, values) for (target, _), values in zip(pairs, expected, strict=True))
