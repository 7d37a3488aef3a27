"""The grammar of layouts, and how layers and dimensions are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.trainer.parallel.placement import Layout, slice_of, stage_layers

sizes = st.integers(1, 64)
layouts = st.builds(lambda r, d, t, p, c: Layout(r * d, t, p, r, c), sizes, sizes, sizes, sizes, sizes)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("d1", Layout()),
        ("d2t2p2", Layout(2, 2, 2)),
        ("p3d4", Layout(data=4, pipeline=3)),
        ("t8", Layout(tensor=8)),
        ("r2d4", Layout(data=8, replicas=2)),
        ("t2r3", Layout(data=3, tensor=2, replicas=3)),
        ("d2c4t2", Layout(data=2, tensor=2, context=4)),
    ],
)
def test_axes_come_in_any_order_and_missing_ones_are_1(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout


@given(layouts, st.randoms())
def test_a_layout_is_read_as_it_is_written_whatever_the_order(layout: Layout, random: object) -> None:
    assert Layout.parse(str(layout)) == layout
    parts = [f"r{layout.replicas}", f"d{layout.data // layout.replicas}", f"t{layout.tensor}", f"p{layout.pipeline}"]
    parts.append(f"c{layout.context}")
    random.shuffle(parts)  # type: ignore[attr-defined]
    assert Layout.parse("".join(parts)) == layout
    assert layout.ranks == layout.replicas * layout.shards * layout.tensor * layout.pipeline
    assert layout.ranks == layout.data * layout.copy


@pytest.mark.parametrize("text", ["", "2", "d", "d0", "d02", "x2", "D2", "d2 t2", "d2,t2", "d-1", "d2x", "d12345"])
def test_what_is_no_layout_is_refused_with_how_one_is_written(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a layout; write d<N>.*for example d2 or d2t2p2"):
        Layout.parse(text)


def test_a_letter_that_comes_twice_is_named() -> None:
    with pytest.raises(ValueError, match="'t' is there twice"):
        Layout.parse("t2d2t4")


def test_data_ranks_are_a_whole_number_of_replicas() -> None:
    with pytest.raises(ValueError, match="not a whole number of replicas"):
        Layout(data=3, replicas=2)


@given(sizes, st.integers(1, 200))
def test_stages_have_contiguous_layers_whose_numbers_differ_by_one_at_most(stages: int, layers: int) -> None:
    cut = [stage_layers(layers, stages, stage) for stage in range(stages)]
    assert [layer for stage in cut for layer in stage] == list(range(layers))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


@given(st.integers(1, 300), st.integers(1, 20))
def test_slices_are_those_of_torch(size: int, parts: int) -> None:
    chunks = list(torch.arange(size).chunk(parts))
    for index in range(parts):
        expected = chunks[index].tolist() if index < len(chunks) else []
        assert list(slice_of(size, parts, index)) == expected
