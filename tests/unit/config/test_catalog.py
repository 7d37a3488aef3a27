"""Names and parameters are checked from source, without torch, and every error says how to fix it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.algorithms.registry import KINDS, policy_loss
from asyncrl.config.plugin_code import catalog
from asyncrl.config.plugin_code.catalog import Param, check, known, registers, resolve
from asyncrl.config.plugin_code.import_paths import PluginError

USER_MODULE = '''
"""A user's algorithms."""
import torch
from asyncrl.algorithms.registry import policy_loss


@policy_loss("half")
def half(inputs, *, factor: float = 0.5, mode: "Literal['a', 'b']" = "a"):
    """Half of it."""


def bare(inputs, *, power: int):
    """No decorator."""
    return power


raise RuntimeError("a check must not run this module")
'''


@pytest.fixture
def user_package(tmp_path, monkeypatch):
    package = tmp_path / "my_algos"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('a check must not run this package')\n")
    (package / "deep" / "losses.py").write_text(USER_MODULE)
    (tmp_path / "lone_algo.py").write_text("def lone(group, *, low: float = 0.0):\n    return low\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name, module in sys.modules.items() if is_below(tmp_path, module)]:
        del sys.modules[name]  # its file goes with this test


def is_below(folder, module):
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_relative_to(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_source_says_is_what_the_function_takes(kind):
    entries = known(kind)
    assert entries
    for name, entry in entries.items():
        function = resolve(kind, name, {p.name: 1 for p in entry.params.values() if p.required}).func
        found = {
            p.name: p
            for p in inspect.signature(function).parameters.values()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        }
        assert found.keys() == entry.params.keys()
        for key, param in entry.params.items():
            assert param.annotation == found[key].annotation
            assert param.required == (found[key].default is inspect.Parameter.empty)
            assert param.required or (param.default == found[key].default and param.accepts(param.default))
        assert function.__doc__


def test_checking_and_filtering_do_not_import_torch():
    program = (
        "import sys;"
        "from asyncrl.algorithms import registry, filters;"
        "from asyncrl.config.plugin_code import catalog;"
        "[catalog.known(k) for k in (*registry.KINDS, 'model_function')];"
        "[catalog.resolve('filter', n) for n in catalog.known('filter')];"
        "catalog.resolve('shaping', 'overlong', {'max_length': 8, 'margin': 2});"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=570)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(PluginError, match=r"did you mean 'grpo'.*known: dr_grpo, .*rloo"):
        check("advantage", "gprpo")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="did you mean 'policy_loss'"):
        known("policy_los")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"clip_hihg": 0.3}, "no parameter 'clip_hihg', did you mean 'clip_high'"),
        ({"clip_high": "0.3"}, r"'clip_high' is '0.3' \(str\), expected float"),
        ({"clip_high": True}, r"'clip_high' is True \(bool\), expected float"),
        ({"dual_clip": "x"}, r"expected float \| None"),
    ],
)
def test_a_bad_parameter_is_named_with_what_to_write(params, message):
    with pytest.raises(ValueError, match=message):
        check("policy_loss", "ppo_clip", params)


def test_a_missing_parameter_is_named():
    with pytest.raises(ValueError, match=r"needs params\.divisor"):
        check("aggregation", "constant")


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        ("float", [1, 0.5], [True, "1", None]),
        ("int", [3], [3.0, False]),
        ("bool", [True], [1]),
        ("str", ["a"], [1]),
        ("float | None", [None, 2.0], ["x"]),
        ("Literal['a', 'b']", ["a"], ["c", 1]),
        ("list[int]", [[1], "anything"], []),
        ("", [object()], []),
    ],
)
def test_annotations_decide_which_values_fit(annotation, good, bad):
    param = Param("p", annotation, required=True)
    assert all(param.accepts(value) for value in good)
    assert not any(param.accepts(value) for value in bad)


@pytest.mark.parametrize("form", ["my_algos.deep.losses:bare", "{folder}/deep/losses.py:bare"])
def test_a_users_function_is_checked_without_running_its_package(user_package, form):
    name = form.format(folder=user_package)
    entry = check("policy_loss", name, {"power": 2})
    assert f"{entry.module}:{entry.function}" == name
    with pytest.raises(ValueError, match="expected int"):
        check("policy_loss", name, {"power": 2.5})


@pytest.mark.parametrize("form", ["my_algos", "my_algos.deep.losses", "{folder}/deep/losses.py"])
def test_a_users_registered_name_is_found_in_its_plugin_package_module_or_file(user_package, form):
    plugins = [form.format(folder=user_package)]
    assert check("policy_loss", "half", {"factor": 1}, plugins).function == "half"
    assert "ppo_clip" in known("policy_loss", plugins)
    with pytest.raises(PluginError, match="unknown policy_loss 'half'"):
        check("policy_loss", "half")


@pytest.mark.parametrize("form", ["lone_algo:lone", "{folder}/../lone_algo.py:lone"])
def test_a_users_function_resolves_with_its_parameters_bound(user_package, form):
    assert resolve("filter", form.format(folder=user_package), {"low": 0.25})(None) == 0.25


def test_a_function_that_a_package_re_exports_is_checked_where_it_is_defined(user_package):
    (user_package.parent / "front_algo.py").write_text("from lone_algo import lone as mine\n")
    assert resolve("filter", "front_algo:mine", {"low": 0.5})(None) == 0.5
    with pytest.raises(ValueError, match="no parameter 'lo', did you mean 'low'"):
        check("filter", "front_algo:mine", {"lo": 0.5})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.losses:fn", r"no module or file 'no_such_package.losses'; is it installed.*PYTHONPATH"),
        ("my_algos.deep.nothing:fn", "no module or file 'my_algos.deep.nothing'"),
        ("my_algos.deep.losses:nothing", r"losses\.py defines no 'nothing'; it has: bare, half"),
        (":fn", "write package.module:name or path/to/file.py:name"),
        ("my_algos.deep.losses.bare", "write my_algos.deep.losses:bare"),
        ("my_loss.py", "write my_loss.py:name"),
        ("no_such_file.py:fn", "no module or file 'no_such_file.py'"),
        ("asyncrl.plugins.agents.single_turn:SingleTurnAgent", "not a plain function"),
    ],
)
def test_an_import_path_that_leads_nowhere_says_why(user_package, name, message):
    with pytest.raises(PluginError, match=message):
        check("policy_loss", name)


def test_a_missing_plugin_module_is_an_error():
    with pytest.raises(ValueError, match="plug-in module 'no_such_plugin' was not found"):
        known("filter", ["no_such_plugin"])


def test_one_name_registered_twice_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "clash_algo.py").write_text("@policy_loss('ppo_clip')\ndef mine(inputs):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"registered twice.*rename one"):
        known("policy_loss", ["clash_algo"])


def test_a_default_that_is_not_a_literal_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "computed_algo.py").write_text("def mine(inputs, *, bound: float = limit()):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="write the value out"):
        check("policy_loss", "computed_algo:mine")


def test_decorating_a_function_with_positional_parameters_is_refused():
    with pytest.raises(TypeError, match=r"after a bare \*"):

        @policy_loss("wrong")
        def wrong(inputs, clip):
            return inputs, clip


def test_the_catalog_reads_this_package_only_once(monkeypatch):
    known("filter")
    monkeypatch.setattr(catalog, "registrations", lambda *_: pytest.fail("the source was read again"))
    assert known("filter")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('@policy_loss("mine")\ndef mine(inputs): ...', True),
        ('if True:\n    @registry.filter_ (\n        "mine"\n    )\n    def mine(group): ...', True),
        ('@my.registry().kl_estimator("mine")\ndef mine(a, b): ...', True),
        ("from asyncrl.algorithms.registry import policy_loss\n\n# policy_loss() of ...\n@other('policy_loss')", False),
        ("def known(kind): ...", False),
    ],
)
def test_files_of_a_package_that_register_something_are_found_by_their_decorators(
    source: str, expected: bool, tmp_path: Path
) -> None:
    file = tmp_path / "algo.py"
    file.write_text(source)
    assert registers(file) is expected


def test_a_syntax_error_in_any_file_of_a_users_package_is_reported(user_package):
    (user_package / "deep" / "helpers.py").write_text("x = 1\ndef half(:\n")  # registers nothing
    with pytest.raises(PluginError, match=r"helpers\.py:2' cannot be read as Python"):
        known("policy_loss", ["my_algos"])
