"""The graph: edges from keys, and every mistake found before a process starts, with the calls named."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.catalog import known
from asyncrl.master.graph import BATCH_KEYS, BUILTIN, Call, Edge, Graph, GraphError, load_graph

FUNCTIONS = {"inf", "train"}


def check(*calls: Call) -> None:
    Graph("g", calls).validate(FUNCTIONS)


def test_edges_follow_from_keys_and_after() -> None:
    graph = Graph(
        "g",
        (
            Call("train", "actor", "train", reads=("tokens", "a", "b")),
            Call("first", "actor", "inf", reads=("tokens",), writes=("a",)),
            Call("second", "ref", "inf", reads=("a",), writes=("b",), after=("first",)),
            Call("last", "ref", "train", after=("train",)),
        ),
    )
    assert set(graph.edges()) == {
        Edge("first", "train", ("a",)),
        Edge("second", "train", ("b",)),
        Edge("first", "second", ("a",)),
        Edge("train", "last", ()),
    }
    assert [call.name for call in graph.order()] == ["first", "second", "train", "last"]


def test_calls_that_may_come_in_any_order_come_as_written() -> None:
    names = ["d", "b", "c", "a"]
    graph = Graph("g", tuple(Call(name, "actor", "inf") for name in names))
    assert [call.name for call in graph.order()] == names


@pytest.mark.parametrize(
    ("calls", "parts"),
    [
        ((), ("no calls",)),
        ((Call("x", "actor", "inf"), Call("x", "ref", "inf")), ("several calls named 'x'",)),
        (
            (Call("x", "actor", "inf", writes=("k",)), Call("y", "ref", "inf", writes=("k",))),
            ("'x'", "'y'", "both write 'k'"),
        ),
        ((Call("x", "actor", "inf", writes=("rewards",)),), ("'x'", "'rewards'", "comes with the trajectories")),
        ((Call("x", "actor", "inf", reads=("reward",)),), ("'x'", "'reward'", "did you mean 'rewards'?")),
        ((Call("x", "actor", "inf", after=("why",)), Call("y", "ref", "inf")), ("'x'", "'why'", "which is not a call")),
        ((Call("x", "actr", "inf"),), ("'x'", "role 'actr'", "did you mean 'actor'?", "no worker hosts")),
        ((Call("x", "actor", "trian"),), ("'x'", "unknown function 'trian'", "did you mean 'train'?")),
        (
            (
                Call("x", "actor", "inf", reads=("c",), writes=("a",)),
                Call("y", "actor", "inf", reads=("a",), writes=("b",)),
                Call("z", "actor", "inf", reads=("b",), writes=("c",)),
            ),
            ("cycle", "'x' -> 'y' -> 'z' -> 'x'"),
        ),
        ((Call("x", "actor", "inf", reads=("a",), writes=("a",)),), ("cycle", "'x' -> 'x'")),
    ],
)
def test_a_mistake_is_found_and_the_calls_are_named(calls: tuple[Call, ...], parts: tuple[str, ...]) -> None:
    with pytest.raises(GraphError) as error:
        check(*calls)
    for part in parts:
        assert part in str(error.value)


def test_calls_behind_a_cycle_are_not_blamed() -> None:
    with pytest.raises(GraphError, match=r"cycle: ('b' -> 'c' -> 'b'|'c' -> 'b' -> 'c');"):
        check(
            Call("a", "actor", "inf", reads=("k",)),
            Call("b", "actor", "inf", reads=("l",), writes=("k",)),
            Call("c", "actor", "inf", reads=("k",), writes=("l",)),
        )


def test_reward_models_are_the_roles_whose_calls_name_a_folder() -> None:
    style = Call("style", "style_reward", "reward", writes=("style",), args={"path": "/models/style"})
    assert Graph("g", (style,)).reward_models() == {"style_reward": "/models/style"}
    Graph("g", (style,)).validate({"reward"})
    with pytest.raises(GraphError, match="role 'other', which no worker hosts"):
        Graph("g", (Call("x", "other", "reward"),)).validate({"reward"})
    with pytest.raises(GraphError, match=r"'style_reward'.*'/b'.*'/models/style'"):
        Graph("g", (style, Call("again", "style_reward", "reward", args={"path": "/b"}))).reward_models()


@pytest.mark.parametrize("name", sorted(BUILTIN))
@pytest.mark.parametrize("prox", ["recompute", "approximate", "behave"])
@pytest.mark.parametrize(("kl_coef", "kl_in"), [(0.0, "loss"), (0.1, "loss"), (0.1, "reward"), (0.1, "advantage")])
def test_every_builtin_graph_is_valid_under_every_setting(name: str, prox: str, kl_coef: float, kl_in: str) -> None:
    config = ExperimentConfig()
    config.algorithm.graph, config.algorithm.prox = name, prox
    config.algorithm.kl_coef, config.algorithm.kl_in = kl_coef, kl_in
    graph = load_graph(config)
    names = [call.name for call in graph.order()]
    assert names[-1] == "actor_train" or name == "ppo"
    assert ("ref_inf" in names) == (kl_coef > 0)
    assert ("actor_inf" in names) == (prox == "recompute" and name != "reinforce")
    reads_reference = [call.name for call in graph.calls if "ref_logprobs" in call.reads]
    assert ("advantage" in reads_reference) == (kl_coef > 0 and kl_in != "loss")


def test_every_key_of_the_builtin_graphs_is_written_and_read() -> None:
    config = ExperimentConfig()
    config.algorithm.kl_coef = 0.1
    for build in BUILTIN.values():
        calls = build(config).calls
        written = {key for call in calls for key in call.writes}
        assert written <= {key for call in calls for key in call.reads}
        assert not written & set(BATCH_KEYS)


def test_an_unknown_graph_names_the_nearest() -> None:
    config = ExperimentConfig()
    config.algorithm.graph = "gpro"
    with pytest.raises(GraphError, match=r"algorithm.graph='gpro'.*did you mean 'grpo'\?"):
        load_graph(config)


def test_arguments_that_a_graph_does_not_take_are_refused() -> None:
    config = ExperimentConfig()
    config.algorithm.graph_args = {"weight": 1}
    with pytest.raises(GraphError, match=r"algorithm.graph_args=.*'weight'.*no arguments"):
        load_graph(config)


def test_a_users_graph_is_found_by_import_path(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "mine.py"
    file.write_text(
        "from asyncrl.master.graph import Call, Graph\n"
        "def build(config, *, role='actor'):\n"
        "    return Graph('mine', (Call('x', role, f'{__file__}:node'),))\n"
        "def node(ctx, batch):\n    return {}\n"
        "def nothing(config):\n    return None\n"
        "def lost(config):\n    return Graph('lost', (Call('x', 'actor', f'{__file__}:gone'),))\n"
    )
    config = ExperimentConfig()
    config.algorithm.graph, config.algorithm.graph_args = f"{file}:build", {"role": "ref"}
    assert load_graph(config).roles() == ("ref",)
    config.algorithm.graph_args = {}
    config.algorithm.graph = f"{file}:nothing"
    with pytest.raises(GraphError, match="returned NoneType"):
        load_graph(config)
    config.algorithm.graph = f"{file}:lost"
    with pytest.raises(GraphError, match=r"call 'x'.*defines no 'gone'"):
        load_graph(config)
    config.algorithm.graph = f"{file}:absent"
    with pytest.raises(GraphError, match="defines no 'absent'"):
        load_graph(config)


def test_registered_model_functions_are_read_from_source(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text("@model_function('a')\ndef f(): ...\n@other('b')\ndef g(): ...\n@model_function\ndef h(): ...\n")
    built_in, with_mine = known("model_function"), known("model_function", [str(source)])
    assert with_mine.keys() - built_in.keys() == {"a"}
    assert {"actor_inf", "advantage", "actor_train", "critic_train"} <= built_in.keys()
