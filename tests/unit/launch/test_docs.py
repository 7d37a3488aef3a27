"""Blocks of docs/evaluation.md and docs/sft.md, and commands of the README and docs/gpu.md: each does as told."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.api.reward import is_verdict
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.variants import evaluation_sets
from asyncrl.data.demonstrations import EncodedRows, load_demonstrations
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.launch.before_start.data import check_data
from asyncrl.launch.before_start.setting_checks import validate, warnings
from asyncrl.launch.commands import eval as evaluation
from asyncrl.runtime.process import hardware
from asyncrl.trainer.supervised.settings import SFTConfig
from asyncrl.trainer.supervised.supervised_loop import held_out_of, phases_of, row_format

DOCS = Path(__file__).resolve().parents[3] / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", blocks("evaluation.md", "yaml"))
def test_settings_of_evaluation_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test", "hard"):
        Path(f"{name}.jsonl").write_text(json.dumps({"prompt": name, "task": name, "answer": "1"}))
    Path("mine.yaml").write_text(f"defaults: [async_ppo, _self_]\nfileroot: {tmp_path}\n{block}")
    config = load_experiment("mine", [], tmp_path)
    assert isinstance(config, ExperimentConfig)
    validate(config)
    check_data(config, tmp_path)
    assert [line for line in warnings(config) if line.startswith("eval")] == []
    assert [each.interval for each in evaluation_sets(config)] in ([20], [20, 100])


def test_the_table_of_evaluation_tells_the_defaults() -> None:
    (each,) = evaluation_sets(ExperimentConfig())
    page = (DOCS / "evaluation.md").read_text(encoding="utf-8")
    reported = {"interval": each.interval, "size": each.size, "n_samples": each.n_samples}
    reported |= {"sampling.temperature": int(each.temperature)}
    for name, value in reported.items():
        assert f"| `{name}` | {value} |" in page


def test_the_marked_reward_is_a_verdict() -> None:
    defined: dict[str, Any] = {}
    for block in blocks("evaluation.md", "python"):
        exec(block, defined)
    assert is_verdict(defined["is_capital"])
    assert defined["is_capital"]({"capital": "Paris"}, "It is Paris.") == 1.0


@pytest.mark.parametrize("line", blocks("evaluation.md", "console")[0].splitlines())
def test_the_command_takes_what_is_shown(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(evaluation, "_evaluate", lambda args, scratch: seen.append(args) or 0)
    arguments = line.removeprefix("$ python -m asyncrl.launch eval ").split()
    assert evaluation.main(arguments, "asyncrl") == 0
    assert seen[0].model == arguments[0]
    overrides = [each for each in arguments if "=" in each]
    assert seen[0].overrides == overrides
    if seen[0].experiment:
        load_experiment(seen[0].experiment, overrides)


def test_supervised_training_is_set_as_shown_and_reads_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_chat_model: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (rows, *_), (settings, by_engine, *_) = blocks("sft.md", "json"), blocks("sft.md", "yaml")
    many = [json.dumps({"prompt": f"{i} + 1?", "completion": str(i + 1)}) for i in range(60)]
    Path("chat.jsonl").write_text(rows + "\n".join(many))
    Path("model").symlink_to(tiny_chat_model)
    Path("mine.yaml").write_text(f"defaults: [sft_schema, _self_]\nfileroot: {tmp_path}\n{settings}")
    config = load_experiment("mine", [], tmp_path)
    assert isinstance(config, SFTConfig)
    validate(config)
    check_data(config, tmp_path)
    Path("engine.yaml").write_text(f"defaults: [sft_schema, _self_]\nfileroot: {tmp_path}\n{by_engine}")
    other = load_experiment("engine", [], tmp_path)
    validate(other)
    check_data(other, tmp_path)
    (phase,), held_out = phases_of(config), held_out_of(config)
    assert held_out is not None
    assert len(phase.dataset) + len(held_out) == 63
    form = row_format(config, load_tokenizer(tiny_chat_model))
    Path("rows.jsonl").write_text(rows)
    encoded = EncodedRows.of(load_demonstrations("rows.jsonl", {}, {}, "train", 0), form, 4096)
    assert [len(row) for row in encoded.rows] == [1, 1, 1]


def test_preference_training_is_set_as_shown_and_reads_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_chat_model: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (_, pairs, labelled), (_, _, policy, reward_model) = blocks("sft.md", "json"), blocks("sft.md", "yaml")
    Path("model").symlink_to(tiny_chat_model)
    many = [json.dumps({"prompt": f"{i} + 1?", "chosen": str(i + 1), "rejected": "0"}) for i in range(60)]
    Path("pairs.jsonl").write_text(pairs + "\n".join(many))
    Path("labelled.jsonl").write_text(labelled)
    more = ["loss.name=kto", "dataset.path=labelled.jsonl"]
    for number, (settings, overrides) in enumerate([(reward_model, []), (policy, []), (policy, more)]):
        Path(f"mine{number}.yaml").write_text(f"defaults: [sft_schema, _self_]\nfileroot: {tmp_path}\n{settings}")
        config = load_experiment(f"mine{number}", overrides, tmp_path)
        assert isinstance(config, SFTConfig)
        validate(config)
        check_data(config, tmp_path)
        form = row_format(config, load_tokenizer(tiny_chat_model))
        (phase,) = phases_of(config)
        rows = EncodedRows.of(phase.dataset, form, 4096).rows
        assert {len(row) for row in rows} == ({1} if overrides else {2})


README = (DOCS.parent / "README.md").read_text(encoding="utf-8") + (DOCS / "gpu.md").read_text(encoding="utf-8")
OWN_CODE = {
    "my_rewards.py": "def score(data, completion):\n    return float(data['answer'] in completion)\n",
    "my_agent.py": "from asyncrl.plugins.agents.single_turn import SingleTurnAgent as MyAgent\n",
    "my_env.py": "from asyncrl.plugins.envs.single_turn import SingleTurnEnv as MyEnv\n",
}


COMMANDS = re.findall(r"^python -m asyncrl.launch (\w+ \\\n(?: .*\n)+)", README, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readmes_commands_for_ones_own_model_have_limits_of_a_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_chat_model: Path, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in OWN_CODE.items():
        Path(name).write_text(text)
    for name in ("my_data", "my_test"):
        Path(f"{name}.jsonl").write_text(json.dumps({"prompt": f"{name}?", "answer": "1"}))
    experiment, *overrides = shlex.split(command.replace("\\\n", ""))
    here = [f"model.path={tiny_chat_model}", f"fileroot={tmp_path}"]
    if any(each.startswith("generation.sglang.python=") for each in overrides):
        here.append(f"generation.sglang.python={sys.executable}")
    if experiment.endswith("gpu"):  # it wants GPUs, which are folders here
        (tmp_path / "gpus" / "0").mkdir(parents=True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(hardware, "_GPUS", tmp_path / "gpus")
        here.append(f"generation.sglang.python={sys.executable}")
    config = load_experiment(experiment, [*overrides, *here])
    assert isinstance(config, ExperimentConfig)
    validate(config)
    check_data(config, tmp_path)
    assert config.dataset.max_prompt_tokens >= 512
    assert config.rollout.sampling.max_new_tokens >= 512
    assert config.optimizer.lr <= 1e-5
