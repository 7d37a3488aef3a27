"""Options of the command line that print what would run, and start nothing: the processes (`--dry-run`) and the
training step's graph (`--show-graph`), as text or as SVG.

The picture is a layered drawing from left to right: a call's column is the length of the longest path to it, so all
edges point right, and boxes start at their column's left edge, where edges arrive. Rows within a column are sorted by
the mean row of their sources (one pass, in column order), which keeps edges short. An edge that skips columns passes
through an empty slot in each, so it never runs behind a box; edges into one box arrive side by side. A box names its
call, role, function (if that has another name) and the keys it writes, which its edges carry. An explicit edge
(`after`) is dashed.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from rich.console import Console

from asyncrl.config.load import Config
from asyncrl.config.run_dir import run_dir_of
from asyncrl.config.secrets import hide
from asyncrl.master.graph import Call, Edge, Graph, load_graph
from asyncrl.plugins.named_inputs import named_inputs
from asyncrl.runtime.backends import backend_class
from asyncrl.runtime.plan import brings_inputs, plan_workers
from asyncrl.trainer.supervised.base_model import base_model_dir
from asyncrl.trainer.supervised.settings import SFTConfig


def dry_run(config: Config, again: Sequence[str] = ()) -> int:
    """Print the processes that a run would start; return the exit code.

    With `system.launcher=kubernetes` that is a YAML file for `kubectl apply -f -`, with the processes as its comment. A
    terminal does not show secrets.

    Args:
        config: the experiment.
        again: arguments of the command that starts it.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if isinstance(config, SFTConfig):
        console.print(f"1 process, {config.threads} threads, makes {base_model_dir(config)}")
        return 0
    run_dir, plans = run_dir_of(config), plan_workers(config)
    objects = backend_class(config.system.launcher).objects(config, plans, again)
    comment = "# " if objects else ""
    console.print(f"{comment}run folder: {run_dir}")
    environments = [set(plan.environment().items()) for plan in plans]
    shared = set.intersection(*environments)
    console.print(f"{comment}environment of every process: {_assignments(shared)}")
    for plan, environment in zip(plans, environments, strict=True):
        resources = plan.resources
        gpus = f"GPUs {','.join(resources.gpus)}" if resources.gpus else "no GPU"
        address = f" ({plan.host.address})" if plan.host.address else ""
        where = f"on {plan.host.name}{address}, " if plan.host.name else ""
        threads = f"{resources.threads} thread{'s' * (resources.threads != 1)}"
        console.print(f"{comment}  {plan.name:<20} {where}{threads}, {gpus}")
        console.print(f"{comment}    {shlex.join(plan.command(run_dir))}")
        if own := environment - shared:
            console.print(f"{comment}    {_assignments(own)}")
    for named in named_inputs(config) if brings_inputs(config) else ():
        if named.path is not None:
            console.print(f"  {named.setting}={named.value}: its files are brought to the hosts of the RolloutWorkers")
        elif named.module:
            console.print(f"  {named.setting}={named.value}: has to be the same on the hosts of the RolloutWorkers")
    if objects:
        for secret in (each["stringData"] for each in objects if each["kind"] == "Secret" and sys.stdout.isatty()):
            console.print("# a terminal does not show the Secret's values: pipe this to kubectl")
            secret.update({name: hide(text) for name, text in secret.items()})
        console.print(yaml.safe_dump_all(objects, sort_keys=False).rstrip("\n"))
    return 0


def _assignments(variables: set[tuple[str, str]]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(variables))


_INPUTS = ""
"""The name used for the trajectories, the source of every input key."""

_WRITES = "\u2192 "

_CHAR = 7.4  # width of a character of 12 px monospace, with a margin for wider fonts
_PAD, _LINE, _ROW_GAP, _COLUMN_GAP, _MARGIN = 12.0, 17.0, 26.0, 56.0, 20.0
_PALETTE = ("#2f6fb0", "#b5562b", "#2e8059", "#7a4fa3", "#a33b5e", "#6b6f1d", "#1f7f8c")


def show_graph(config: Config, target: str) -> int:
    """Print the graph, or write it to the file `target` as SVG; returns the exit code."""
    if isinstance(config, SFTConfig):
        print("error: a supervised experiment has no graph", file=sys.stderr)
        return 1
    graph = load_graph(config)
    if target == "-":
        Console(highlight=False, markup=False, soft_wrap=True).print(to_text(graph))
    else:
        Path(target).write_text(to_svg(graph))
    return 0


def to_text(graph: Graph) -> str:
    """Return the calls as text in the order of execution, one block each."""
    lines = [f"graph {graph.name}: {len(graph.calls)} calls"]
    before = graph.predecessors()
    for number, call in enumerate(graph.order(), start=1):
        lines.append(f"  {number}. {call.name}  [{call.role}]  {call.function}")
        lines.append(f"       reads   {', '.join(call.reads) or '-'}")
        lines.append(f"       writes  {', '.join(call.writes) or '-'}")
        if call.args:
            lines.append(f"       args    {', '.join(f'{key}={value}' for key, value in call.args.items())}")
        lines.append(f"       after   {', '.join(sorted(before[call.name])) or 'the trajectories'}")
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class _Node:
    """A box or, without lines, the slot in which an edge passes a column; the edge leaves `through` at the column's
    end.
    """

    name: str
    column: int
    lines: tuple[str, ...]
    colour: str
    row: float = 0.0
    through: float = 0.0
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        return max((len(line) for line in self.lines), default=0) * _CHAR + 2 * _PAD if self.lines else 0.0

    @property
    def height(self) -> float:
        return len(self.lines) * _LINE + 2 * _PAD - 6 if self.lines else _LINE


@dataclass(frozen=True, slots=True)
class _Route:
    """An edge drawn through the nodes `path`, from a box to a box."""

    path: tuple[_Node, ...]
    keys: tuple[str, ...]


def to_svg(graph: Graph) -> str:
    """Return the graph as a self-contained SVG document."""
    columns, routes = _layout(graph)
    width, height = _lay_out(columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-size="12" '
        'font-family="ui-monospace,Menlo,Consolas,monospace">',
        f"<title>Training step graph {escape(graph.name)}</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="10" fill="#ffffff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#667085"/></marker></defs>',
        *(_draw_route(route, arrival) for route, arrival in zip(routes, _arrivals(routes), strict=True)),
        *(_draw_box(node) for column in columns for node in column if node.lines),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _layout(graph: Graph) -> tuple[list[list[_Node]], list[_Route]]:
    """Return boxes and slots by column, and the routes through them."""
    order = graph.order()
    edges = [*_input_edges(graph), *graph.edges()]
    depth: dict[str, int] = {_INPUTS: 0}
    for call in order:
        depth[call.name] = 1 + max((depth[edge.source] for edge in edges if edge.target == call.name), default=0)
    colours = {role: _PALETTE[index % len(_PALETTE)] for index, role in enumerate(graph.roles())}
    nodes = {_INPUTS: _Node(_INPUTS, 0, ("trajectories",), "#475467")}
    nodes |= {call.name: _Node(call.name, depth[call.name], _box_lines(call), colours[call.role]) for call in order}
    columns: list[list[_Node]] = [[] for _ in range(max(depth.values()) + 1)]
    for node in nodes.values():
        columns[node.column].append(node)
    routes = []
    for edge in sorted(edges, key=lambda edge: depth[edge.target] - depth[edge.source]):
        slots = [_Node(edge.target, column, (), "") for column in range(depth[edge.source] + 1, depth[edge.target])]
        for slot in slots:
            columns[slot.column].append(slot)
        routes.append(_Route((nodes[edge.source], *slots, nodes[edge.target]), edge.keys))
    _order_rows(columns, routes)
    return columns, routes


def _input_edges(graph: Graph) -> list[Edge]:
    """Return edges from the trajectories to every call without predecessors; the box names the keys it reads of
    them.
    """
    before: Mapping[str, frozenset[str]] = graph.predecessors()
    return [Edge(_INPUTS, call.name, ()) for call in graph.calls if not before[call.name]]


def _box_lines(call: Call) -> tuple[str, ...]:
    function = () if call.function == call.name else (call.function.rpartition("/")[2],)
    return (call.name, f"role {call.role}", *function, *(f"{_WRITES}{key}" for key in call.writes))


def _order_rows(columns: list[list[_Node]], routes: list[_Route]) -> None:
    """Sort each column by the mean row of its nodes' sources; nodes with equal means keep their order."""
    sources: dict[int, list[_Node]] = {}
    for route in routes:
        for left, right in zip(route.path, route.path[1:], strict=False):
            sources.setdefault(id(right), []).append(left)
    for column in columns:
        for node in column:
            feeding = sources.get(id(node), [])
            node.row = sum(source.row for source in feeding) / len(feeding) if feeding else 0.0
        column.sort(key=lambda node: (node.row, not node.lines))
        for index, node in enumerate(column):
            node.row = index - (len(column) - 1) / 2


def _lay_out(columns: list[list[_Node]]) -> tuple[float, float]:
    """Set every node's coordinates (left edge, vertical centre); return the drawing's size."""
    heights = [sum(node.height for node in column) + _ROW_GAP * (len(column) - 1) for column in columns]
    tallest = max(heights)
    x = _MARGIN
    for column, height in zip(columns, heights, strict=True):
        width = max(node.width for node in column)
        y = _MARGIN + (tallest - height) / 2
        for node in column:
            node.x, node.through = x, width - node.width
            node.y = y + node.height / 2
            y += node.height + _ROW_GAP
        x += width + _COLUMN_GAP
    return x - _COLUMN_GAP + _MARGIN, tallest + 2 * _MARGIN


def _draw_box(node: _Node) -> str:
    top = node.y - node.height / 2
    texts = []
    for index, line in enumerate(node.lines):
        ink = 'font-weight="600" fill="#101828"' if index == 0 else 'fill="#475467"'
        ink = f'fill="{node.colour}"' if line.startswith(_WRITES) else ink
        y = top + _PAD + 8 + index * _LINE
        texts.append(f'<text x="{node.x + _PAD:.1f}" y="{y:.1f}" {ink}>{escape(line)}</text>')
    frame = (
        f'<rect x="{node.x:.1f}" y="{top:.1f}" width="{node.width:.1f}" height="{node.height:.1f}" rx="7" '
        f'fill="#ffffff" stroke="{node.colour}" stroke-width="1.6"/>'
    )
    return "\n".join([frame, *texts])


def _arrivals(routes: list[_Route]) -> list[float]:
    """Return the height at which each route reaches its target: spread over the box, in the order of the sources."""
    heights = [0.0] * len(routes)
    for target in {id(route.path[-1]): route.path[-1] for route in routes}.values():
        arriving = [index for index, route in enumerate(routes) if route.path[-1] is target]
        arriving.sort(key=lambda index: routes[index].path[-2].y)
        for number, index in enumerate(arriving, start=1):
            heights[index] = target.y + target.height * (number / (len(arriving) + 1) - 0.5)
    return heights


def _draw_route(route: _Route, arrival: float) -> str:
    source = route.path[0]
    x, y = source.x + source.width + source.through, source.y
    path = [f"M{source.x + source.width:.1f} {y:.1f}", f"H{x:.1f}"]
    for node in route.path[1:]:
        last = node is route.path[-1]
        end_x, end_y = node.x - 2 if last else node.x, arrival if last else node.y
        middle = (x + end_x) / 2
        path.append(f"C{middle:.1f} {y:.1f} {middle:.1f} {end_y:.1f} {end_x:.1f} {end_y:.1f}")
        if not last:
            path.append(f"H{end_x + node.through:.1f}")
        x, y = end_x + node.through, end_y
    dashes = "" if route.keys or not route.path[0].name else ' stroke-dasharray="4 3"'
    return (
        f'<path d="{" ".join(path)}" fill="none" stroke="#98a2b3" stroke-width="1.4"{dashes} marker-end="url(#tip)"/>'
    )
