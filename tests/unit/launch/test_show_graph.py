"""Pictures of a graph: everything is in them, nothing overlaps, edges point right."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.launch.previews import to_svg, to_text
from asyncrl.master.graph import BUILTIN, Call, Graph

SVG = "{http://www.w3.org/2000/svg}"


def builtin(name: str) -> Graph:
    config = ExperimentConfig()
    config.algorithm.kl_coef = 0.1
    return BUILTIN[name](config)


def boxes(root: ET.Element) -> list[tuple[float, float, float, float]]:
    rects = [rect for rect in root.iter(f"{SVG}rect") if rect.get("x")]
    return [tuple(float(rect.attrib[key]) for key in ("x", "y", "width", "height")) for rect in rects]  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_the_svg_shows_every_call_role_and_key_inside_the_picture(name: str) -> None:
    graph = builtin(name)
    root = ET.fromstring(to_svg(graph))
    texts = {text.text for text in root.iter(f"{SVG}text")}
    for call in graph.calls:
        assert {call.name, f"role {call.role}"} <= texts
        assert {f"\u2192 {key}" for key in call.writes} <= texts
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for x, y, box_width, box_height in boxes(root):
        assert 0 <= x <= x + box_width <= width
        assert 0 <= y <= y + box_height <= height


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_boxes_do_not_overlap_and_edges_end_to_the_right(name: str) -> None:
    graph = builtin(name)
    root = ET.fromstring(to_svg(graph))
    for (ax, ay, aw, ah), (bx, by, bw, bh) in itertools.combinations(boxes(root), 2):
        assert ax + aw < bx or bx + bw < ax or ay + ah < by or by + bh < ay
    paths = [path.attrib["d"] for path in root.iter(f"{SVG}path") if path.get("marker-end")]
    assert len(paths) >= len(graph.edges())
    for path in paths:
        numbers = [float(number) for number in re.findall(r"-?\d+\.\d+", path)]
        assert numbers[0] < numbers[-2]


def test_markup_in_names_is_escaped() -> None:
    graph = Graph("a<b", (Call("x&y", "actor", "p.py:<f>"),))
    root = ET.fromstring(to_svg(graph))
    assert "x&y" in {text.text for text in root.iter(f"{SVG}text")}


def test_the_text_lists_the_calls_in_the_order_of_execution() -> None:
    text = to_text(builtin("ppo"))
    positions = [text.index(f". {name} ") for name in ("critic_inf", "advantage", "critic_train", "actor_train")]
    assert positions == sorted(positions)
    assert "writes  advantages, returns" in text
