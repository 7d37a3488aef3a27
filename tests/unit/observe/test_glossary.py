"""Every metric is in one table, from which the page of metrics is made."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrl
from asyncrl.comm.ended_rollouts import DROPPED, DropReason
from asyncrl.manager.messages import ServerState
from asyncrl.master.evaluations import evaluation_metrics
from asyncrl.observe.metrics.glossary import find, find_figure, glossary
from asyncrl.rollout.user_code_pool.call_records import Activity

PACKAGE = Path(asyncrl.__file__).parent
METRICS, GROUPS, OBSERVED = glossary().metrics, glossary().groups, glossary().figures
PACKAGES = ("master", "colocated", "rollout", "trainer", "algorithms", "chat", "data", "plugins")
_NAME = re.compile(r"[a-z_<>]+/[a-zA-Z_<>@: ]+")
"""The form of a metric's name; what an f-string fills in is `<>`."""


def text_of(node: ast.expr | None) -> str | None:
    """Return the string that `node` is, with `<>` where something is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "<>" for part in node.values)
    return None


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the strings that are keys of mappings or subscripts in `tree`, and constants in capitals."""
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            found = list(node.keys)
        elif isinstance(node, ast.DictComp):
            found = [node.key]
        elif isinstance(node, ast.Subscript):
            found = [node.slice]
        elif isinstance(node, ast.Assign) and all(isinstance(to, ast.Name) and to.id.isupper() for to in node.targets):
            found = [node.value]
        yield from (text for text in map(text_of, found) if text is not None)


def in_code() -> set[str]:
    found = set()
    for file in (file for package in PACKAGES for file in (PACKAGE / package).rglob("*.py")):
        found |= {name for name in names_in(ast.parse(file.read_text())) if _NAME.fullmatch(name)}
    return found


NO_METRICS = {"</tool_call>", "tool/<>", "rollout/lost_episodes: ", "row/source_number"}
"""Keys of this form that name something else (a part of a reward, for one), or only the beginning of a name."""
NO_METRICS |= {"return/<>", "won/<>"}  # numbers of an agent, which are `agent/<name>`
IN_TABLE = {re.sub(r"<[^>]*>", "<>", metric.name) for metric in METRICS}
OF_KINDS = {"eval/<>/<>", "<>/<>", "rollout/<>_s", "chat/<>"}
"""Names of which the code fills in a part from a closed list; the tests below go through each list."""


def test_every_name_that_the_code_writes_is_in_the_table() -> None:
    names = in_code() - NO_METRICS - OF_KINDS
    assert len(names) > 60, "the names are found"
    unknown = {name for name in names if name not in IN_TABLE and ("<>" in name or find(name) is None)}
    assert not unknown, "add each to asyncrl/observe/metrics/glossary.yaml"


def constants(file: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, (PACKAGE / file).read_text()))


def test_names_that_the_code_makes_from_lists_are_in_the_table() -> None:
    laps = constants("master/train_loop.py", r'\blap\(measured, "(\w+)"')
    chat = constants("chat/episode_client.py", r'_counts\["(\w+)"\]')
    calls = constants("master/graph.py", r'\bCall\(\s*"(\w+)"')
    assert min(len(laps), len(chat), len(calls)) > 2, "the names are found"
    made = [
        *(f"time/{name}_s" for name in laps | calls),
        *(f"chat/{name}" for name in chat),
        *(f"rollout/{activity}_s" for activity in Activity),
        *(DROPPED + reason for reason in DropReason),
    ]
    assert [name for name in made if name not in IN_TABLE] == []
    evaluated = [f"eval/held_out/{name}" for name in (*evaluation_metrics(8), "failed")]
    assert [name for name in evaluated if find(name) is None] == []


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("time/my_call_s", "time/<call>_s"),
        ("time/actor_train_s", "time/actor_train_s"),
        ("eval/math/accuracy", "eval/<set>/accuracy"),
        ("eval/math/pass@4", "eval/<set>/pass@<k>"),
        ("eval/math/tool/search/calls", "eval/<set>/<metric>"),
        ("eval/math/reward/right", "eval/<set>/<metric>"),
        ("rollout/lost_episodes: env a/b.py:Game.step raised ValueError", "rollout/lost_episodes: <failure>"),
        ("rollout/dropped_failed: reward a/b.py:score", "rollout/dropped_failed: <code>"),
        ("rollout/dropped_filter: zero_variance", "rollout/dropped_filter: <reason>"),
        ("reward/tool/search", "reward/<name>"),
        ("reward/role/judge", "reward/role/<role>"),
        ("tool/search/calls", "tool/<name>/calls"),
        ("tool/search/pages", "tool/<name>/<number>"),
        ("row/level", "row/<field>"),
    ],
)
def test_a_name_of_a_row_leads_to_its_entry(name: str, entry: str) -> None:
    found = find(name)
    assert found is not None
    assert found.name == entry


@pytest.mark.parametrize("name", ["forgotten", "time/forgotten", "eval/math/forgotten", "rollout/forgotten", "ppo/x"])
def test_a_name_that_nobody_wrote_down_has_no_entry(name: str) -> None:
    assert find(name) is None


def test_every_entry_is_complete_and_stands_alone() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert {metric.group for metric in METRICS} == set(GROUPS)
    assert all(metric.meaning.endswith(".") and metric.healthy.endswith(".") for metric in METRICS)
    figures = [figure.name for figure in OBSERVED]
    assert len(set(figures)) == len(figures)


def test_every_state_of_a_server_is_a_figure() -> None:
    assert [state for state in ServerState if find_figure(f"servers_{state.value}") is None] == []
