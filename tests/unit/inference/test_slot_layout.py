"""Slots lie one after the other in a buffer, and a plan's index is where its keys are in it."""

from __future__ import annotations

import torch

from asyncrl.inference.embedded.cache import DecodePlan, SlotLayout


def test_a_decode_plan_writes_its_positions_of_every_head() -> None:
    layout = SlotLayout(torch.device("cpu"))
    layout.change(length=5, tokens=17)
    assert layout.rows == 3, "two positions are left over"
    for heads in (1, 2):
        slots = layout.view(torch.zeros(17, heads * 4), heads)
        plan = DecodePlan(2, torch.tensor([4, 1]))
        slots.view(-1, 4)[plan.index(layout, heads)] = 1.0
        written = slots[..., 0].nonzero().tolist()
        assert written == sorted([row, head, place] for row, place in ((0, 4), (1, 1)) for head in range(heads))
        assert plan.index(layout, heads) is plan.index(layout, heads)


def test_a_spare_buffer_is_used_again_while_it_has_the_present_size() -> None:
    layout = SlotLayout(torch.device("cpu"))
    layout.change(length=2, tokens=4)
    first, second = torch.zeros(4, 3), torch.zeros(4, 3)
    assert layout.swap_spare(first).shape == (4, 3)
    assert layout.swap_spare(second) is first
    layout.change(length=3, tokens=9)
    assert layout.swap_spare(first).shape == (9, 3)
