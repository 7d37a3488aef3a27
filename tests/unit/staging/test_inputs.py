"""Input files of RolloutWorkers are brought to other hosts as they are at the launch, or compared there."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.api.picture import Picture, PictureError
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.config.run_dir import DATA_RECORD_FILE, run_dir_of
from asyncrl.config.setting import ChoiceConfig, ConfigError
from asyncrl.config.variants import evaluation_sets
from asyncrl.data.datasets import DataRecord
from asyncrl.data.settings import SourceConfig
from asyncrl.launch.before_start.data import keep_inputs, not_found_elsewhere
from asyncrl.plugins.named_inputs import files_in_args, named_inputs
from asyncrl.plugins.settings import McpServerConfig, NamedRewardConfig, ToolConfig
from asyncrl.rollout.settings import EvalSetConfig
from asyncrl.rollout.user_code.prompts import load_eval_set, load_train_set
from asyncrl.runtime.plan import MANAGER_PART, STAGING_PROCESS, WORKER_INPUTS, brings_inputs
from asyncrl.runtime.settings import HostConfig
from asyncrl.staging.inputs import (
    Inputs,
    bring_inputs,
    check_rows,
    import_named,
    not_on_other_hosts,
    read_from,
)


def rows_of(file: Path, count: int) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": f"{file.stem} {row}"}) + "\n" for row in range(count)))
    return file


def code_of(file: Path, content: str = "def made(*args): return 1.0\n") -> Path:
    file.write_text(content)
    return file


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The launcher's disk."""
    folder = tmp_path / "here"
    (folder / "model").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / "model" / name).write_text("{}")
    (folder / "model" / "additional_chat_templates").mkdir()
    (folder / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    return folder


@pytest.fixture
def config(here: Path) -> ExperimentConfig:
    config = ExperimentConfig()
    config.model.path = str(here / "model")
    config.dataset.path = str(rows_of(here / "train.jsonl", 5))
    config.reward.path = f"{code_of(here / 'rewards.py')}:made"
    config.eval.interval = 0
    return config


@pytest.fixture
def brought(here: Path, tmp_path: Path) -> Callable[..., Path]:
    """Bring the inputs of a config to another host, and remove the launcher's disk."""

    def bring(config: ExperimentConfig, **how: Any) -> Path:
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        bring_inputs(config, run_dir, **how)
        there = tmp_path / "there"
        (run_dir / "inputs").rename(there)
        here.rename(tmp_path / "away")
        return there

    return bring


def test_data_code_and_the_models_other_files_are_read_where_they_were_brought_to(
    config: ExperimentConfig, brought: Callable[..., Path]
) -> None:
    there = brought(config)
    inputs = read_from(there, config)
    assert config.model.path == str(there / "model")
    brought_files = [file.name for file in sorted((there / "model").rglob("*")) if file.is_file()]
    assert brought_files == ["tool_use.jinja", "config.json", "tokenizer.json"]
    train = load_train_set(config)
    assert [train.row(row)["prompt"] for row in (0, 4)] == ["train 0", "train 4"]
    check_rows(inputs, "dataset", config.dataset.path, train)
    assert Path(load_plugin(config.reward.path).__code__.co_filename).is_relative_to(there)
    assert config.agent.path == ExperimentConfig().agent.path  # what comes with asyncrl stays as it is


def test_of_a_folder_come_the_files_that_are_read_and_of_a_file_that_is_named_twice_one_copy(
    config: ExperimentConfig, here: Path, brought: Callable[..., Path]
) -> None:
    for name in ("main/train-1.jsonl", "main/train-0.jsonl", "other/test-0.jsonl"):
        rows_of(here / "folder" / name, 2)
    config.dataset.path, config.dataset.args = str(here / "folder"), {"files": "main/train-*"}
    config.tools = [ToolConfig(path=config.reward.path, name="again")]
    config.rewards = [NamedRewardConfig(name="one", path=config.reward.path)]
    expected = [dict(load_train_set(config).row(row)) for row in range(4)]
    there = brought(config)
    read_from(there, config)
    assert [load_train_set(config).row(row) for row in range(4)] == expected
    assert not list(there.rglob("test-0.jsonl"))
    assert load_plugin(config.tools[0].path) is load_plugin(config.rewards[0].path)
    assert len(list(there.rglob("rewards.py"))) == 1


def test_a_link_is_brought_by_its_own_name(config: ExperimentConfig, here: Path, brought: Callable[..., Path]) -> None:
    (here / "blobs").mkdir()
    (here / "train.jsonl").rename(here / "blobs" / "abc")
    (here / "train.jsonl").symlink_to(Path("blobs", "abc"))
    there = brought(config)
    assert Inputs.read(there).brought["dataset.path"] == "0/train.jsonl"
    read_from(there, config)
    assert load_train_set(config).row(4)["prompt"] == "train 4"


def test_sources_keep_the_names_of_their_rows_and_evaluation_sets_their_own_files(
    config: ExperimentConfig, here: Path, brought: Callable[..., Path]
) -> None:
    paths = [str(rows_of(here / f"{name}.jsonl", 3)) for name in ("a", "b")]
    config.dataset.sources = [SourceConfig(path=path) for path in paths]
    config.eval.interval = 1
    config.eval.sets = [
        EvalSetConfig(name="held", path=str(rows_of(here / "held.jsonl", 2))),
        EvalSetConfig(name="never", path=str(here / "nowhere.jsonl"), interval=0),
    ]
    config.dataset.chat_template = str(code_of(here / "chat.txt", "{{ messages }}"))
    there = brought(config)
    inputs = read_from(there, config)
    mixed = load_train_set(config)
    assert {mixed.row(row)["source"] for row in range(len(mixed))} == set(paths)
    check_rows(inputs, "dataset", "", mixed)
    (each, _) = evaluation_sets(config)
    check_rows(inputs, "eval.sets[0]", each.path or "", load_eval_set(config, each))
    assert Path(config.dataset.chat_template).read_text() == "{{ messages }}"
    assert config.eval.sets[1].path == str(here / "nowhere.jsonl")


def test_the_code_of_an_evaluation_set_is_brought_with_the_files_that_it_names(
    config: ExperimentConfig, here: Path, brought: Callable[..., Path]
) -> None:
    code, table = code_of(here / "graded.py", "def score(data, completion): return 0.0\n"), here / "own.py"
    code_of(table, "def table(): ...\n")
    config.eval.reward = {"path": f"{code}:score", "args": {"table": f"{table}:table"}}
    there = brought(config)
    read_from(there, config)
    assert config.eval.reward["path"].startswith(str(there))
    assert Path(config.eval.reward["path"].removesuffix(":score")).read_text().startswith("def score(")
    assert config.eval.reward["args"]["table"].startswith(str(there))


def test_an_evaluation_brings_nothing_that_it_does_not_read(
    config: ExperimentConfig, here: Path, brought: Callable[..., Path]
) -> None:
    (here / "train.jsonl").unlink()
    config.eval.interval, config.eval.path = 1, str(rows_of(here / "held.jsonl", 2))
    there = brought(config, training=False)
    inputs = read_from(there, config, training=False)
    assert inputs.rows.keys() == {"eval"}
    assert len(load_eval_set(config, evaluation_sets(config)[0])) == 2


def test_a_path_in_args_replaces_the_settings_there_too(
    config: ExperimentConfig, here: Path, brought: Callable[..., Path]
) -> None:
    config.eval.interval, config.eval.args = 1, {"path": str(rows_of(here / "held.jsonl", 2))}
    there = brought(config)
    inputs = read_from(there, config)
    held_out = load_eval_set(config, evaluation_sets(config)[0])
    assert held_out.row(1)["prompt"] == "held 1"
    check_rows(inputs, "eval", "", held_out)


def test_what_the_data_was_when_the_trial_began_comes_along(
    config: ExperimentConfig, tmp_path: Path, here: Path
) -> None:
    record = DataRecord.of(load_train_set(config))
    record.write(tmp_path / DATA_RECORD_FILE)
    bring_inputs(config, tmp_path)
    assert DataRecord.read(tmp_path / "inputs" / DATA_RECORD_FILE) == record
    (tmp_path / DATA_RECORD_FILE).unlink()
    bring_inputs(config, tmp_path)  # of the next launch: of the former nothing is left
    assert not (tmp_path / "inputs" / DATA_RECORD_FILE).exists()


def test_nothing_is_copied_where_all_rollout_workers_are_on_the_launchers_host(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    config.fileroot = str(tmp_path)
    run_dir_of(config).mkdir(parents=True)
    keep_inputs(config)
    config.system.shared_filesystem = False
    config.system.hosts = [HostConfig(runs=["rollout_worker"]), HostConfig(name="b", runs=["generation_server"])]
    keep_inputs(config)
    assert not list(run_dir_of(config).iterdir())
    assert list(not_found_elsewhere(config)) == []
    assert not brings_inputs(config)
    config.system.hosts[1].runs.append("rollout_worker")
    keep_inputs(config)
    assert [path.name for path in run_dir_of(config).iterdir()] == ["inputs"]
    assert brings_inputs(config)
    config.samples.eval_every = 1
    assert [problem.partition("=")[0] for problem in not_found_elsewhere(config)] == ["samples.eval_every"]


@pytest.mark.parametrize("part", [MANAGER_PART, STAGING_PROCESS, WORKER_INPUTS])
def test_what_other_processes_load_of_staging_is_there(part: str) -> None:
    assert callable(pkgutil.resolve_name(part))


MADE_ROWS = """
from pathlib import Path

class Rows:
    def __init__(self, *, split, seed, file, later=0):
        self.text, self.later = Path(file).read_text(), later

    def __len__(self):
        return 1000

    def row(self, index):
        return {"prompt": f"{self.text} {index}", "object": self, "late": index >= 900 and self.later}
"""


ROWS_WITH_PLACES = """
class Rows:
    def __init__(self, *, split, seed, template):
        self.template = template

    def __len__(self):
        return 3

    def row(self, index):
        return {"prompt": str(index), "made_by": __file__, "template": self.template}
"""


@pytest.mark.parametrize("place", ["there", "thére"])
def test_rows_may_say_where_they_were_read_from(
    config: ExperimentConfig, here: Path, tmp_path: Path, place: str, brought: Callable[..., Path]
) -> None:
    words = code_of(here / "words.py")
    config.dataset.path = f"{code_of(here / 'rows.py', ROWS_WITH_PLACES)}:Rows"
    config.dataset.args = {"template": f"{words}:made"}
    there = brought(config)
    (tmp_path / "elsewhere").mkdir()
    there.rename(tmp_path / "elsewhere" / place)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    inputs = read_from(tmp_path / "link" / place, config)
    rows = load_train_set(config)
    assert rows.row(0)["made_by"] == str(tmp_path / "elsewhere" / place / "0" / "rows.py")
    check_rows(inputs, "dataset", config.dataset.path, rows)


def test_rows_that_a_class_makes_otherwise_on_another_host_are_refused_by_name(
    config: ExperimentConfig, here: Path, tmp_path: Path, brought: Callable[..., Path]
) -> None:
    reported = tmp_path / "told.txt"
    reported.write_text("one")
    config.dataset.path = f"{code_of(here / 'rows.py', MADE_ROWS)}:Rows"
    config.dataset.args = {"file": str(reported)}
    there = brought(config)
    inputs = read_from(there, config)
    check_rows(inputs, "dataset", config.dataset.path, load_train_set(config))
    for args in ({"later": 1}, {"file": str(code_of(tmp_path / "else.txt", "two"))}):
        config.dataset.args |= args
        with pytest.raises(ConfigError, match=r"dataset.path='.*rows.py:Rows': makes other rows on this host"):
            check_rows(inputs, "dataset", config.dataset.path, load_train_set(config))


IMAGES = """
class Images:
    def __init__(self, *, split, seed, path):
        pass

    def __len__(self):
        return 1

    def row(self, index):
        return {"prompt": "what is it?"}
"""


def test_a_folder_in_args_of_a_dataset_class_is_the_classs_own(
    config: ExperimentConfig, here: Path, tmp_path: Path, brought: Callable[..., Path]
) -> None:
    (tmp_path / "png").mkdir()
    (tmp_path / "png" / "0.png").write_text("")
    config.dataset.path, config.dataset.args = (
        f"{code_of(here / 'rows.py', IMAGES)}:Images",
        {"path": str(tmp_path / "png")},
    )
    config.eval.interval, config.eval.args = 1, {"path": str(tmp_path / "png")}
    inputs = read_from(brought(config), config)
    assert inputs.brought.keys() == {"dataset.path", "reward.path"}
    assert config.dataset.args["path"] == config.eval.args["path"] == str(tmp_path / "png")


def test_what_cannot_be_copied_or_read_is_named_by_its_setting(
    config: ExperimentConfig, here: Path, tmp_path: Path
) -> None:
    config.tools = [ToolConfig(path=f"{here / 'nowhere.py'}:add", name="add")]
    with pytest.raises(ConfigError, match=r"^tools\[0\].path='.*nowhere.py:add': .*No such file"):
        bring_inputs(config, tmp_path)
    (here / "none").mkdir()
    config.tools, config.dataset.path = [], str(here / "none")
    with pytest.raises(ConfigError, match=r"^dataset.path='.*none': .* has no data files"):
        bring_inputs(config, tmp_path)


def test_files_in_args_have_to_be_the_same_under_the_same_path(
    config: ExperimentConfig, tmp_path: Path, brought: Callable[..., Path]
) -> None:
    table, script = code_of(tmp_path / "table.json", "[1]"), code_of(tmp_path / "server.py")
    config.env.args = {"inner": [{"table": str(table)}], "name": "a/b", "folder": str(tmp_path)}
    config.mcp = [McpServerConfig(name="s", command="python", args=["-u", str(script)])]
    config.rollout.filters = [ChoiceConfig("accuracy_range", {"file": str(table)})]
    wanted = {"env.args.inner[0].table", "mcp[0].args[1]", "rollout.filters[0].params.file"}
    assert {name for name, _ in files_in_args(config)} == wanted
    there = brought(config)
    assert read_from(there, config).same.keys() == wanted
    table.write_text("[2]")
    script.unlink()
    with pytest.raises(ConfigError) as error:
        read_from(there, config)
    assert f"env.args.inner[0].table={str(table)!r}: is another file on this host" in str(error.value)
    assert f"mcp[0].args[1]={str(script)!r}: this host has no such file" in str(error.value)


def test_code_that_args_name_is_brought_or_compared(
    config: ExperimentConfig,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    brought: Callable[..., Path],
) -> None:
    (tmp_path / "mine").mkdir()
    code_of(tmp_path / "mine" / "named_in_args.py", "def made(): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    monkeypatch.chdir(here)
    agent, _ = code_of(here / "agent.py"), code_of(here / "words.py")
    served = code_of(tmp_path / "server.py")
    config.agent.args = {"run": f"{agent}:made", "args": {"inner": [f"{agent}:made", "nowhere.py:made"]}}
    config.env.args = {
        "observe": "words.py:made",
        "act": "named_in_args:made",
        "at": "localhost:made",
        "x": "json:loads",
    }
    config.mcp = [McpServerConfig(name="s", command="serve", args=[f"{served}:app"])]
    assert list(files_in_args(config)) == [("mcp[0].args[0]", str(served))]
    there = brought(config)
    inputs = read_from(there, config)
    for named in (config.agent.args["run"], config.agent.args["args"]["inner"][0], config.env.args["observe"]):
        assert named.startswith(f"{there}/")
        assert load_plugin(named)() == 1.0
    assert config.agent.args["run"] == config.agent.args["args"]["inner"][0]
    assert config.agent.args["args"]["inner"][1] == "nowhere.py:made"
    assert inputs.same.keys() == {"mcp[0].args[0]"}
    assert import_named(config) == {"named_in_args"}


def test_a_folder_of_data_in_args_is_read_where_it_was_brought_to(
    config: ExperimentConfig, here: Path, brought: Callable[..., Path]
) -> None:
    rows_of(here / "folder" / "some.jsonl", 3)
    config.dataset.args = {"path": str(here / "folder")}
    there = brought(config)
    read_from(there, config)
    assert load_train_set(config).row(2)["prompt"] == "some 2"


def test_files_of_the_home_in_args_have_to_be_the_same_in_each_hosts_home(
    config: ExperimentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brought: Callable[..., Path]
) -> None:
    for home, content in (("one", "[1]"), ("two", "[1]"), ("three", "[2]")):
        (tmp_path / home).mkdir()
        code_of(tmp_path / home / "corpus.jsonl", content)
    config.tools = [ToolConfig(path="asyncrl.plugins.tools.search:Search", args={"corpus": "~/corpus.jsonl"})]
    monkeypatch.setenv("HOME", str(tmp_path / "one"))
    assert list(not_on_other_hosts(config)) == []
    there = brought(config)
    monkeypatch.setenv("HOME", str(tmp_path / "two"))
    assert read_from(there, config).same.keys() == {"tools[0].args.corpus"}
    monkeypatch.setenv("HOME", str(tmp_path / "three"))
    with pytest.raises(ConfigError, match=r"tools\[0\].args.corpus='~/corpus.jsonl': is another file on this host"):
        read_from(there, config)


def test_a_text_in_args_that_is_no_path_is_left_alone(config: ExperimentConfig) -> None:
    text = "yes/no: " + "is the answer right? " * 300
    config.agent.args = {
        "prompt": text,
        "code": f"{text}.py:run",
        "null": "a/\0",
        "home": "~ of 3/4",
        "user": "~nobody_here/x",
    }
    config.mcp = [McpServerConfig(name="s", command="python", args=["-c", text])]
    assert list(files_in_args(config)) == []
    assert not [named for named in named_inputs(config) if named.setting.startswith("agent.args")]
    assert list(not_on_other_hosts(config)) == []


def test_files_of_the_current_folder_in_args_are_refused_before_anything_starts(
    config: ExperimentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("server.py", "corpus.jsonl", "python"):
        code_of(tmp_path / name)
    config.mcp = [McpServerConfig(name="s", command="python", args=["server.py"])]
    config.tools = [ToolConfig(path="my_tools:add", args={"table": "./server.py", "corpus": "corpus.jsonl"})]
    reported = [problem.partition(":")[0] for problem in not_on_other_hosts(config)]
    assert reported == [
        "tools[0].args.table='./server.py'",
        "tools[0].args.corpus='corpus.jsonl'",
        "mcp[0].args[0]='server.py'",
    ]
    config.mcp[0].args, config.tools = [str(tmp_path / "server.py")], []
    assert list(not_on_other_hosts(config)) == []
    config.mcp[0].command, config.mcp[0].args = "./server.py", []
    assert [problem.partition("=")[0] for problem in not_on_other_hosts(config)] == ["mcp[0].command"]


def test_a_pattern_of_data_files_is_no_file_of_the_current_folder(
    config: ExperimentConfig, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    config.dataset.path, config.dataset.args = str(here), {"files": "train.jsonl"}
    assert list(not_on_other_hosts(config)) == []
    config.dataset.path, config.dataset.args = "my_data:Rows", {"files": "train.jsonl"}  # a class's own
    assert [problem.partition("=")[0] for problem in not_on_other_hosts(config)] == ["dataset.args.files"]


def test_a_file_of_a_user_that_this_host_has_not_is_missing_by_name(
    config: ExperimentConfig, brought: Callable[..., Path]
) -> None:
    there = brought(config)
    index = there / "inputs.json"
    reported = json.loads(index.read_text())
    reported["same"] = {
        "reward.args.words": {"path": "~nobody-of-this-name/words.txt", "content": {"bytes": 1, "xxh3": "0" * 16}}
    }
    index.write_text(json.dumps(reported))
    with pytest.raises(
        ConfigError, match=r"reward\.args\.words='~nobody-of-this-name/words.txt': this host has no such"
    ):
        read_from(there, config)


def test_modules_that_settings_name_are_known_and_one_that_is_not_installed_is_named(
    config: ExperimentConfig,
) -> None:
    config.agent.path, config.env.path = "nowhere_agents.one:Agent", "gymnasium:FrozenLake-v1"
    config.algorithm.plugins = ["json"]
    config.reward.path = "fractions:Fraction"
    modules = {named.setting: named.module for named in named_inputs(config) if named.module}
    assert modules == {"agent.path": "nowhere_agents.one", "reward.path": "fractions", "algorithm.plugins[0]": "json"}
    with pytest.raises(ConfigError, match=r"agent.path='nowhere_agents.one:Agent': module .* cannot be imported"):
        import_named(config)
    config.agent.path, config.env.path = "fractions:Fraction", "gymnasium:my_games.lake:Lake-v1"
    assert [named.module for named in named_inputs(config) if named.setting == "env.path"] == ["my_games.lake"]
    config.env.path = "gymnasium:FrozenLake-v1"
    assert import_named(config) == {"fractions", "json"}


def test_filters_that_are_registered_in_a_file_of_the_users_come_along(
    config: ExperimentConfig, here: Path, brought: Callable[..., Path]
) -> None:
    content = (
        "from asyncrl.algorithms.registry import filter_\n\n"
        '@filter_("my_filter")\ndef mine(group, *, least: float = 0.5):\n    return True\n'
    )
    config.algorithm.plugins = [str(code_of(here / "my_filters.py", content))]
    config.rollout.filters = [ChoiceConfig("my_filter")]
    there = brought(config)
    read_from(there, config)
    assert Path(config.algorithm.plugins[0]).is_relative_to(there)
    import_named(config)


def test_the_index_reads_back(config: ExperimentConfig, brought: Callable[..., Path]) -> None:
    there = brought(config)
    inputs = Inputs.read(there)
    assert inputs.brought == {"dataset.path": "0/train.jsonl", "reward.path": "1/rewards.py"}
    assert inputs.rows.keys() == {"dataset"}


def test_pictures_that_rows_name_come_along(
    config: ExperimentConfig, here: Path, brought: Callable[..., Path], tmp_path: Path
) -> None:
    picture = Picture.from_array(np.full((4, 6, 3), 9, np.uint8))
    (here / "data" / "drawn").mkdir(parents=True)
    (here / "data" / "drawn" / "one.png").write_bytes(picture.data)
    rows = [{"prompt": f"What is it? {name}", "images": [name]} for name in ("drawn/one.png", "drawn/missing.png")]
    (here / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.dataset.path = str(here / "data" / "rows.jsonl")
    there = brought(config)
    inputs = read_from(there, config)
    dataset = load_train_set(config)
    found = [part["image"] for row in range(2) for part in dataset.row(row)["prompt"][0]["content"][:1]]
    assert found[0].picture() == picture
    assert found[0].value.is_relative_to(there)
    with pytest.raises(PictureError, match=r"missing\.png cannot be read"):
        found[1].picture()
    check_rows(inputs, "dataset", config.dataset.path, dataset)
