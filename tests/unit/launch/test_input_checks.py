"""Data that a run cannot use, a base model's bad recipe, evaluation on training data: found before anything starts."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.api.picture import Picture
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.setting import ConfigError
from asyncrl.launch import __main__ as launch
from asyncrl.launch.before_start.data import check_data, check_prompts
from asyncrl.launch.before_start.setting_checks import resolve_length, validate, warnings
from asyncrl.runtime.settings import HostConfig

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(*lines)`: a JSONL file of these lines."""

    def written(*lines: str) -> Path:
        path = tmp_path / f"data{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("\n".join(lines))
        return path

    return written


def check(experiment: str, *overrides: str, folder: Path | None = None) -> None:
    config = load_experiment(experiment, overrides, folder)
    validate(config)
    check_data(config, folder)


def message_of(experiment: str, *overrides: str, folder: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check(experiment, *overrides, folder=folder)
    return str(caught.value)


def test_a_layout_that_the_base_model_does_not_fit_though_it_is_not_made_yet(tmp_path: Path) -> None:
    config = load_experiment("async_ppo", ["trainer.parallel=t3", f"fileroot={tmp_path}"])
    with pytest.raises(
        ConfigError, match=r"trainer\.parallel='t3': qwen2 cannot be cut into 3 tensor slices.*t1, t2 or t4"
    ):
        check_data(config, None)


GOOD = json.dumps({"prompt": "1+1=", "answer": "2"})


@pytest.mark.parametrize("setting", ["dataset", "eval"])
@pytest.mark.parametrize(
    ("lines", "part"),
    [
        (["{not json"], ":1 is not JSON"),
        ([GOOD, "[1]"], ":2 is a JSON list"),
        ([GOOD, GOOD, '{"answer": "2"}'], ":3 has no text in any of the fields"),
        ([], "has no rows"),
    ],
)
def test_a_file_with_a_bad_line_ends_with_one_message(write: Write, setting: str, lines: list[str], part: str) -> None:
    good, bad = write(GOOD), write(*lines)
    paths = {"dataset": good, "eval": good} | {setting: bad}
    message = message_of("async_ppo", *(f"{group}.path={path}" for group, path in paths.items()))
    assert message.startswith(f"{setting}.path='{bad}'")
    assert part in message
    assert len(message.splitlines()) == 1


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path, write: Write) -> None:
    folder = tmp_path / "rows.jsonl"
    folder.mkdir()
    message = message_of("async_ppo", f"dataset.path={folder}", f"eval.path={write(GOOD)}")
    assert "cannot be read (Is a directory)" in message


def test_a_constructor_that_refuses_its_arguments_says_why() -> None:
    message = message_of("async_ppo", "dataset.args.num_rows=0")
    assert message.startswith(
        "dataset.path='asyncrl.plugins.datasets.arithmetic:ArithmeticDataset' with args {'num_rows': 0}"
    )
    assert "give at least 1" in message


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("def row(self, index): return {'question': 'a'}", "row 0 has no text under 'prompt'"),
        ("def row(self, index): return {}['a']", "KeyError: 'a'"),
        ("def rows(self): ...", "row(index)"),
    ],
)
def test_a_class_whose_rows_are_no_use_is_refused(tmp_path: Path, body: str, part: str) -> None:
    (tmp_path / "rows.py").write_text(
        "class Rows:\n    def __init__(self, *, split, seed): ...\n    def __len__(self): return 1\n    " + body + "\n"
    )
    message = message_of("async_ppo", f"dataset.path={tmp_path / 'rows.py'}:Rows")
    assert message.startswith(f"dataset.path='{tmp_path / 'rows.py'}:Rows': ")
    assert part in message


def test_demonstrations_are_looked_through_too(write: Write) -> None:
    assert "none of the fields completion, response, answer" in message_of(
        "sft", f"dataset.path={write(GOOD, json.dumps({'prompt': 'x'}))}", "phases=[{steps: 1}]"
    )
    assert "give at least 1" in message_of("sft", "phases=[{steps: 1, args: {num_rows: 0}}]")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "none of the fields completion, response, answer"),
        ({"prompt": "x", "completion": None}, "its 'completion' is None: give each row an answer"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]},
            "message 1 has no text",
        ),
        ({"prompt": "x", "completion": [{"role": "user", "content": "y"}]}, "do not end with an assistant's"),
    ],
)
def test_a_demonstration_with_nothing_to_imitate_is_named_with_its_line(
    write: Write, row: dict[str, Any], message: str
) -> None:
    good = json.dumps({"prompt": "x", "completion": "y"})
    found = message_of("sft", f"dataset.path={write(good, json.dumps(row))}", "phases=[{steps: 1}]")
    assert re.search(rf"\.jsonl:2: .*{re.escape(message)}", found), found


def test_a_base_models_recipe_is_checked_before_it_is_followed(tmp_path: Path) -> None:
    (tmp_path / "bad_base.yaml").write_text("defaults: [sft, _self_]\nbatch_size: 0\n")
    (tmp_path / "bad_rows.yaml").write_text("defaults: [sft, _self_]\ndataset: {args: {max_numbers: 1}}\n")
    for name, part in (
        ("bad_base", "batch_size=0: below"),
        ("bad_rows", "need 2 <= min <= max"),
        ("stf", "no experiment 'stf'"),
        ("async_ppo", "makes no base model"),
    ):
        overrides = (f"model.base_experiment={name}", f"fileroot={tmp_path}")
        message = message_of("async_ppo", *overrides, folder=tmp_path)
        assert message.startswith(f"model.base_experiment='{name}': ")
        assert part in message


def test_evaluation_does_not_take_the_training_file_silently(write: Write) -> None:
    data = f"dataset.path={write(*(json.dumps({'prompt': str(i)}) for i in range(100)))}"
    message = message_of("async_ppo", data)
    for part in ("eval.path=null", "eval.path=...", "dataset.args.held_out_share=0.05", "eval.interval=0"):
        assert part in message
    assert "eval.args.held_out_share=0.1" in message_of("async_ppo", data, "eval.args.held_out_share=0.1")
    split = (data, "dataset.args.held_out_share=0.1")
    assert "dataset.args.prompt_template" in message_of("async_ppo", *split, "eval.args.prompt_template='{prompt}!'")
    check("async_ppo", *split)
    check("async_ppo", data, "eval.interval=0")
    check("async_ppo", data, f"eval.path={write(GOOD)}")
    check("async_ppo", data, f"eval.args.path={write(GOOD)}")


@pytest.mark.parametrize("command", [["--dry-run"], []])
def test_bad_data_ends_the_command_with_2_before_anything_is_made(
    tmp_path: Path, write: Write, command: list[str], warm_python: str
) -> None:
    root, bad = tmp_path / "root", write(GOOD, "{")
    settings = [f"dataset.path={bad}", f"eval.path={bad}", f"fileroot={root}"]
    line = [warm_python, "-m", "asyncrl.launch", "async_ppo", *settings, *command]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=570, check=False)
    assert ended.returncode == 2
    assert f"error: dataset.path='{bad}': {bad}:2 is not JSON" in ended.stderr
    assert not root.exists()


def test_the_best_by_accuracy_is_refused_where_no_reward_is_a_verdict(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(data, completion):\n    return 0.5\n")
    settings = [f"reward.path={tmp_path / 'mine.py'}:score", "checkpoint.interval=5"]
    message = message_of("async_ppo", "checkpoint.keep_best=eval/held_out/accuracy", *settings)
    assert "no reward is a verdict" in message
    assert "eval/held_out/reward_mean" in message
    check("async_ppo", "checkpoint.keep_best=eval/held_out/reward_mean", *settings)
    check("async_ppo", "checkpoint.keep_best=eval/held_out/accuracy", "reward.verdict=true", *settings)
    check("async_ppo", "checkpoint.keep_best=eval/held_out/accuracy", "eval.reward.verdict=true", *settings)


def test_each_evaluation_set_is_loaded_and_one_that_is_the_training_file_is_said(write: Write) -> None:
    good, bad = write(GOOD), write("{not json")
    sets = f"eval.sets=[{{name: same, path: {good}}}, {{name: broken, path: {bad}}}]"
    message = message_of("async_ppo", f"dataset.path={good}", sets)
    assert f"eval.sets[1].path='{bad}'" in message
    assert ":1 is not JSON" in message
    config = load_experiment("async_ppo", [f"dataset.path={good}", sets.replace(str(bad), str(write(GOOD)))])
    assert isinstance(config, ExperimentConfig)
    (warning,) = [line for line in warnings(config) if line.startswith("eval")]
    assert "eval.sets[0].path" in warning
    assert "it is the training file" in warning


@pytest.mark.parametrize(("epochs", "steps"), [(2.0, 5), (1.5, 3), (0.4, 1)])
def test_a_length_in_epochs_becomes_whole_steps(write: Write, epochs: float, steps: int) -> None:
    rows = write(*(json.dumps({"prompt": "1+1=", "answer": "2"}) for _ in range(10)))
    config = load_experiment(
        "async_ppo", [f"total_epochs={epochs}", "train_batch_size=4", f"dataset.path={rows}", "dataset.args={}"]
    )
    resolve_length(config)
    assert isinstance(config, ExperimentConfig)
    assert config.total_train_steps == steps


def test_fewer_epochs_than_a_step_are_refused(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write(json.dumps({"prompt": "1+1=", "answer": "2"}))
    given = ["total_epochs=3", "train_batch_size=4", f"dataset.path={rows}", "dataset.args={}"]
    assert launch.main(["async_ppo", *given, "--cfg", "job"]) == 2
    assert "error: total_epochs=3: of 1 rows that is less than one step" in capsys.readouterr().err


def test_answers_are_not_kept_by_workers_that_do_not_share_the_runs_folder(tiny_model: Path) -> None:
    config = load_experiment("async_ppo", [f"model.path={tiny_model}", "samples.eval_every=1"])
    assert isinstance(config, ExperimentConfig)
    check_data(config, None)
    config.system.shared_filesystem = False
    config.system.hosts = [HostConfig(runs=["generation_server"]), HostConfig(name="b", runs=["rollout_worker"])]
    with pytest.raises(ConfigError, match=r"^samples\.eval_every=1: .*set samples\.eval_every=0$"):
        check_data(config, None)


def test_a_run_that_takes_no_pictures_refuses_them_before_it_starts(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "one.png").write_bytes(Picture.from_array(np.zeros((4, 4, 3), np.uint8)).data)
    shown = json.dumps({"prompt": "What?", "image": "one.png", "answer": "2"})
    (tmp_path / "rows.jsonl").write_text(f"{GOOD}\n{shown}")
    overrides = [f"model.path={tiny_model}", f"dataset.path={tmp_path}/rows.jsonl", "eval.interval=0"]
    config = load_experiment("async_ppo", [*overrides, f"fileroot={tmp_path}"])
    assert isinstance(config, ExperimentConfig)
    with pytest.raises(ConfigError, match="dataset: row 1: the prompt has pictures, and this run takes none"):
        check_prompts(config)
