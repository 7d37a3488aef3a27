"""A wrong setting ends before anything starts, with a message that names setting, value and how to fix it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import SCHEMAS, experiment_folders, known_experiments, load_experiment, settings
from asyncrl.config.run_dir import read_run_config, write_run_config
from asyncrl.config.setting import ConfigError, setting_info
from asyncrl.launch import commands as commands_package
from asyncrl.launch.__main__ import main
from asyncrl.launch.before_start.setting_checks import is_hub_name, validate
from asyncrl.launch.commands import COMMANDS
from asyncrl.launch.help import experiment_help, fitted, help_page, list_experiments
from asyncrl.manager.router import POLICIES
from asyncrl.rollout.checks import code_problems
from asyncrl.runtime.settings import EXIT_CONFIG
from asyncrl.trainer.parallel.placement import worker_grid


def load(*overrides: str) -> ExperimentConfig:
    config = load_experiment("async_ppo", overrides)
    assert isinstance(config, ExperimentConfig)
    return config


def message_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(load(*overrides))
    return str(caught.value)


def adopting(url: str) -> list[str]:
    """Overrides for an SGLang server that runs already."""
    return ["generation.backend=sglang", f"generation.sglang.urls=[{url}]"]


PPO = ("algorithm.graph=ppo", "algorithm.advantage.name=gae")
BUILT_IN = {name: summary for folder in experiment_folders(None) for name, summary in known_experiments(folder).items()}
ANYWHERE = sorted(name for name in BUILT_IN if not name.endswith("gpu"))
"""The others are checked where GPUs are pretended, in tests/unit/launch/test_show_allocation.py."""


@pytest.mark.parametrize("name", ANYWHERE)
def test_every_built_in_experiment_is_valid_as_it_stands(name: str, tiny_chat_model: Path) -> None:
    config = load_experiment(name, [])
    if config.model.path is not None and is_hub_name(config.model.path):  # which becomes a folder before the checks
        config.model.path = str(tiny_chat_model)
    validate(config)
    if isinstance(config, ExperimentConfig):
        assert [problem for problem in code_problems(config) if "no module" not in problem] == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("train_batchsize", "train_batch_size"),
        ("steps", "total_train_steps"),
        ("lr", "optimizer.lr"),
        ("opimizer.lr", "optimizer.lr"),
        ("optimizer.max_gradnorm", "optimizer.max_grad_norm"),
        ("critic.lr", "algorithm.critic.optimizer.lr"),
        ("model_path", "model.path"),
        ("max_new_tokens", "rollout.sampling.max_new_tokens"),
        ("temperature", "rollout.sampling.temperature"),
        ("sglang.python", "generation.sglang.python"),
        ("eval.intervall", "eval.interval"),
    ],
)
def test_a_misspelt_setting_is_answered_with_the_one_that_was_meant(written: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown setting '{written}' in '{written}=8'; did you mean '{meant}'\?"):
        load(f"{written}=8")


def test_a_setting_like_no_other_is_answered_without_a_guess() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'xyzzy' in 'xyzzy=8'; --help lists all of them"):
        load("xyzzy=8")


def test_all_wrong_overrides_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load("lr=1", "on_stale=maks", "group_size=2", "seed", "train_batch_size=many", "optimizer=3")
    reported = str(caught.value).splitlines()
    assert [line for line in reported if "group_size" in line] == []
    for part in ("'lr'", "on_stale", "'seed'", "train_batch_size=", "optimizer is a group"):
        assert len([line for line in reported if part in line]) == 1, part
    assert len(reported) == 5


def test_a_misspelt_experiment_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"no experiment 'async_pop'.*did you mean 'async_ppo'"):
        load_experiment("async_pop", [])


def test_a_misspelt_command_is_answered_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctr", "some/run"]) == EXIT_CONFIG
    reported = capsys.readouterr().err
    assert "no experiment 'doctr'" in reported
    assert "and no such command, did you mean 'doctor'?" in reported
    assert "commands: attach, audit" in reported


def test_a_group_of_settings_takes_no_value() -> None:
    with pytest.raises(ConfigError, match="optimizer is a group of settings"):
        load("optimizer=3")


def test_a_value_of_the_wrong_type_names_the_setting_and_the_value() -> None:
    with pytest.raises(ConfigError, match="train_batch_size='many': a whole number is needed"):
        load("train_batch_size=many")


def test_an_override_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="'seed' is not setting=value"):
        load("seed")


def test_a_home_folder_or_a_quote_in_a_value_needs_no_quoting() -> None:
    assert load("fileroot=~/my runs").fileroot == "~/my runs"
    assert load("experiment_name=it's").experiment_name == "it's"


def test_keys_of_a_mapping_need_no_plus_sign() -> None:
    config = load("algorithm.policy_loss.params.clip_low=0.3", "agent.args={retries: 2}")
    assert config.algorithm.policy_loss.params == {"clip_low": 0.3}
    assert config.agent.args == {"retries": 2}


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["optimizer.lr=-1"], ["optimizer.lr=-1.0", "use 0 or more"]),
        (["on_stale=keep"], ["on_stale='keep'", "drop, mask, wait"]),
        (["on_stale=maks"], ["on_stale='maks'", "did you mean 'mask'? choose one of drop, mask, wait"]),
        (["system.launcher=locl"], ["system.launcher='locl'", "did you mean 'local'?"]),
        (["train_batch_size=30"], ["train_batch_size=30", "ppo_minibatches=4", "28 or 32"]),
        (["trainer.parallel=x2"], ["trainer.parallel='x2'", "d2"]),
        (["trainer.parallel=d9"], ["trainer.parallel='d9'", "at most d8"]),
        (["trainer.buffer_capacity=159"], ["trainer.buffer_capacity=159", "160 or more"]),
        (["trainer.buffer_capacity=79", "trainer.parallel=d2"], ["2 rank(s) hold 158", "= 160", "80 or more"]),
        (["group_size=1"], ["group_size=1", "group_size=2"]),
        (
            ["rollout.filters=[{name: zero_variance}]", "+algorithm.advantage.params.turn_discount=0.5"],
            ["turn_discount=0.5", "rollout.filters[0].params", "params={turns: true}"],
        ),
        (
            ["on_stale=mask", "+algorithm.advantage.params.turn_discount=0.5"],
            ["turn_discount=0.5", "use on_stale=drop or wait"],
        ),
        (
            ["checkpoint.keep_best=eval/held_out/acuracy"],
            ["keep_best='eval/held_out/acuracy'", "did you mean 'eval/held_out/accuracy'? use one of", "len_mean"],
        ),
        (
            ["checkpoint.keep_best=eval/held_out/accuracy", "eval.interval=0"],
            ["checkpoint.keep_best=", "no step has both", "eval.interval=0"],
        ),
        (
            ["checkpoint.keep_best=eval/held_out/accuracy", "eval.interval=7", "checkpoint.interval=31"],
            ["no step has both an evaluation (eval.interval=7) and a checkpoint (checkpoint.interval=31)"],
        ),
        (
            [
                "eval.n_samples=8",
                "eval.sampling.temperature=1",
                "checkpoint.keep_best=eval/held_out/pass@4",
                "eval.interval=7",
                "checkpoint.interval=31",
            ],
            ["no step has both", "(eval.interval=7)", "(checkpoint.interval=31)"],
        ),
        (["checkpoint.keep_best=eval/held_out/pass@4"], ["no evaluation measures it"]),
        (["eval.n_samples=4"], ["eval.n_samples=4", "greedy", "eval.sampling.temperature=1.0"]),
        (["eval.name=a/b"], ["eval.name='a/b'", "letters, digits"]),
        (["eval.name=.."], ["eval.name='..'", "but at its start"]),
        (["eval.sets=[{name: a, path: /nowhere.jsonl}]"], ["eval.sets[0].path='/nowhere.jsonl'", "no such file"]),
        (["eval.sets=[{name: a, path: /}, {name: a, path: /}]"], ["eval.sets[1].name='a'", "another one"]),
        (["eval.reward.paht=a:b"], ["eval.reward.paht", "did you mean 'path'?"]),
        (["eval.env.processes=3"], ["eval.env.processes=3", "share these processes; set env.processes"]),
        (["eval.reward.timeout_s=0"], ["eval.reward.timeout_s=0", "use 0.01 s or more"]),
        (["eval.reward.timeout_s=soon"], ["eval.reward.timeout_s", "soon"]),
        (["eval.agent.path=nowhere:X"], ["eval.agent.path='nowhere:X'", "no module or file"]),
        (["eval.env.path=asyncrl.nowhere:X"], ["eval.env.path=", "no module or file"]),
        (["eval.agent.run_in=loop"], ["eval.agent.run_in=loop", "use auto"]),
        (["rewards=[{name: a, path: 'x:y'}]", "eval.reward.verdict=true"], ["eval.reward=", "give it a path"]),
        (
            ["eval.sets=[{name: a, path: /, agent: {path: 'nowhere:X'}}]"],
            ["eval.sets[0].agent.path='nowhere:X'", "no module or file"],
        ),
        (
            ["eval.agent={path: 'asyncrl.plugins.agents.tool_agent:ToolAgent'}", "rollout.chat.max_turns=2"],
            ["rollout.chat.max_turns=2: eval.agent.args.max_turns="],
        ),
        (["eval.sets=[{name: a, path: /, size: 0}]"], ["eval.sets[0].size=0", "use 1 prompt or more"]),
        (
            ["eval.sets=[{name: a, path: /, sampling: {top_p: 0}}]"],
            ["eval.sets[0].sampling.top_p=0", "use 1e-06 or more"],
        ),
        (
            ["eval.sets=[{name: a, path: /, reward: {timeout_s: nan}}]"],
            ["reward.timeout_s=nan", "not a finite number"],
        ),
        (["eval.sets=[{name: a, path: /}]", "eval.path=/"], ["eval.path='/'", "together with eval.sets"]),
        (["eval.sampling.max_new_tokens=500", "generation.context_length=400"], ["= 532", "or more"]),
        (["rollout.sampling.temperature=0"], ["rollout.sampling.temperature=0.0", "use 1.0"]),
        (["generation.context_length=20"], ["generation.context_length=20", "or more"]),
        (["generation.max_running_requests=4"], ["generation.max_running_requests=4", "group_size=8"]),
        (["generation.max_total_tokens=20"], ["generation.max_total_tokens=20", "or more"]),
        (["policies=[{name: a b}]"], ["policies: 'a b'", "begins with a letter"]),
        (["policies=[{name: a}, {name: a}]"], ["policies: 'a': 2 policies have this name"]),
        (["policies=[{name: a, path: /nowhere}]"], ["policies: 'a': path='/nowhere'", "no config.json"]),
        (["policies=[{name: a, versions: {every: 60}}]", "total_train_steps=60"], ["versions.every=60", "use less"]),
        (["policies=[{name: a, path: /, versions: {every: 3}}]"], ["leave out path or versions"]),
        (["policies=[{name: a}]", "system.shared_filesystem=false"], ["policies: their weights are not brought"]),
        (["policies=[{name: a}]", *adopting("http://127.0.0.1:1")], ["policies: their servers are started"]),
        (["policies=[{name: a, url: 'http://127.0.0.1:1', path: /}]"], ["url='http://127.0.0.1:1'", "url or path"]),
        (["policies=[{name: a, url: 'http://127.0.0.1:1', versions: {every: 3}}]"], ["leave out url or versions"]),
        (["policies=[{name: a, url: 'http://127.0.0.1:1', trained: true}]"], ["leave out url or trained"]),
        (["policies=[{name: a, url: 'http://127.0.0.1:1', servers: 2}]"], ["servers=2", "leave servers out"]),
        (["policies=[{name: a, url: 'http://127.0.0.1:1', train_every: 2}]"], ["set trained: true"]),
        (["policies=[{name: a, url: 127.0.0.1}]"], ["policies: 'a': url='127.0.0.1'", "give http://host:port"]),
        (
            ["policies=[{name: a, url: 'http://10.9.9.9:1'}]"],
            ["'a': url='http://10.9.9.9:1'", "in the clear"],
        ),
        (
            ["policies=[{name: a, url: 'http://127.0.0.1:1/'}]", *adopting("http://127.0.0.1:1")],
            ["policies: 'a': url='http://127.0.0.1:1'", "the run updates that server"],
        ),
        (
            ["policies=[{name: a, url: 'http://127.0.0.1:1'}]", "rollout.sampling.allowed_token_ids=3-5"],
            ["policies: 'a': url='http://127.0.0.1:1': rollout.sampling.allowed_token_ids='3-5'"],
        ),
        (
            ["policies=[{name: a}]", "generation.backend=sglang", "manager.weight_transport=distributed"],
            ["policies: 'a': older versions are read from their folders", "use weight_transport=disk"],
        ),
        (["policies=[{name: a, versions: {pick: best}}]"], ["policies[0].versions.pick='best'", "uniform, latest"]),
        (["policies=[{name: a, train_every: 2}]"], ["policies: 'a': train_every:", "set trained: true"]),
        (["policies=[{name: a, trained: true, versions: {keep: 2}}]"], ["policies: 'a': a trained policy is asked at"]),
        (["policies=[{name: a, trained: true, train_offset: 1}]"], ["train_offset=1: no version", "use 0 to 0"]),
        (["policies=[{name: ref, trained: true}]"], ["policies: 'ref': it is a role", "another name"]),
        (["policies=[{name: a, trained: true, optimizer: {lr: -1}}]"], ["policies: 'a': optimizer.lr=-1.0: below"]),
        (
            ["policies=[{name: a, trained: true, optimizer: {rate: 1}}]"],
            ["policies: 'a': optimizer.rate: no such setting"],
        ),
        (
            ["policies=[{name: a, trained: true, algorithm: {advantage: {name: grpoo}}}]"],
            ["policies: 'a': algorithm.advantage='grpoo'", "grpo"],
        ),
        (["policies=[{name: a, ranks: own}]"], ["policies: 'a': ranks:", "set trained: true"]),
        (
            ["policies=[{name: a, trained: true, parallel: d2}]"],
            ["policies.a.parallel='d2': 2 ranks, more than the actor's 1", "or policies.a.ranks=own"],
        ),
        (
            ["policies=[{name: a, trained: true, algorithm: {kl_coef: 1, reference: {mode: ema, ranks: own}}}]"],
            ["policies: 'a': algorithm.reference.mode='ema'", "its ranks shared"],
        ),
        (
            ["policies=[{name: a, trained: true, ranks: own, algorithm: {kl_coef: 0.1, kl: {name: full}}}]"],
            ["policies: 'a': algorithm.kl='full'", "trainer.engine=flat"],
        ),
        (
            ["policies=[{name: a, trained: true, shared_critic: true}]"],
            ["policies: 'a': shared_critic=true: algorithm.graph has no critic", "graph=ppo"],
        ),
        (
            [
                *PPO,
                "policies=[{name: a, trained: true, shared_critic: true, algorithm: {critic: {path: /}}}]",
            ],
            ["policies: 'a': shared_critic=true: its critic has the settings of algorithm.critic"],
        ),
        (
            [
                *PPO,
                "policies=[{name: a, trained: true, shared_critic: true, "
                "algorithm: {graph: grpo, advantage: {name: rae}}}]",
            ],
            ["policies: 'a': shared_critic=true: the policy's algorithm.graph has no critic"],
        ),
        (
            ["policies=[{name: a, trained: true}]", "algorithm.advantage.name=remax"],
            ["advantage='remax': with several"],
        ),
        (
            ["policies=[{name: a, trained: true}]", "trainer.score_ahead=true"],
            ["trainer.score_ahead=true: with several"],
        ),
        (["policies=[{name: a, trained: true}]", "model.lora.rank=4"], ["model.lora.rank=4: with several trained"]),
        (["policies=[{name: a, trained: true}]", "samples.only=true"], ["samples.only=True: with several"]),
        (
            [
                "policies=[{name: a, trained: true}]",
                "generation.backend=sglang",
                "manager.weight_transport=distributed",
            ],
            ["policies: 'a': its weights are read from folders", "use weight_transport=disk"],
        ),
        (["trainer.train_every=2"], ["trainer.train_every=2: other steps would train nothing"]),
        (["trainer.train_offset=3"], ["trainer.train_offset=3", "use 0 to 0"]),
        (["model.path=/nowhere"], ["model.path='/nowhere'", "config.json"]),
        (["dataset.path=/nowhere.jsonl"], ["dataset.path='/nowhere.jsonl'", "no such file"]),
        (["dataset.path=rows.txt"], ["dataset.path='rows.txt'", "ends in .jsonl"]),
        (["eval.path=asyncrl.plugins.datasets.arithmetic:Arithmetic"], ["eval.path=", "defines no 'Arithmetic'"]),
        (
            ["agent.path=asyncrl.plugins.agents.single_turn.SingleTurnAgent"],
            ["write asyncrl.plugins.agents.single_turn:Single"],
        ),
        (["agent.path=nowhere:Agent"], ["agent.path='nowhere:Agent'", "PYTHONPATH"]),
        (["agent.path=asyncrl.plugins.agents.single_turn:Agnet"], ["defines no 'Agnet'", "SingleTurnAgent"]),
        (["reward.path=plain"], ["reward.path", "package.module:name"]),
        (["algorithm.policy_loss.name=gpso"], ["'gpso'", "did you mean 'gspo'"]),
        (["algorithm.policy_loss.params.clipp=1"], ["'clipp'"]),
        (["algorithm.plugins=[no_such_package]"], ["algorithm.plugins", "'no_such_package'", "PYTHONPATH"]),
        (["generation.backend=sglang", "generation.sglang.python=/no/python"], ["/no/python", "not an executable"]),
        (["manager.update_mode=inplace"], ["manager.update_mode='inplace'", "interrupt, retract, in_place, finish"]),
        (["manager.weight_transport=tensor"], ["manager.weight_transport='tensor'", "backend='embedded'", "disk"]),
        (
            [*adopting("http://10.1.1.1:1"), "manager.weight_transport=tensor"],
            ["'http://10.1.1.1:1'", "distributed or disk"],
        ),
        ([*adopting("http://10.1.1.1:1"), "manager.weight_transport=distributed"], ["cannot reach", "system.host"]),
        (
            [*adopting("http://127.0.0.1:1"), "manager.weight_transport=tensor", "generation.sglang.args.dp_size=2"],
            ["generation.sglang.args.dp_size=2", "generation.servers"],
        ),
        (
            [*adopting("http://127.0.0.1:1"), "manager.weight_transport=tensor", "generation.sglang.args.nnodes=2"],
            ["manager.weight_transport='tensor'", "generation.sglang.args.nnodes=2"],
        ),
        (["system.name_resolve=etcd3"], ["system.name_resolve_root", "host:port"]),
        (["samples.replay=/kept", "eval.interval=3"], ["eval.interval=3", "leave it 0"]),
        (["samples.replay=/kept", "samples.only=true", "eval.interval=0"], ["samples.only=true", "samples.replay"]),
        (["trial_name=../up"], ["trial_name='../up'", "folder"]),
        (["fileroot=/proc/1/x"], ["fileroot='/proc/1/x'"]),
    ],
)
def test_a_bad_value_or_combination_names_setting_value_and_what_to_do(overrides: list[str], parts: list[str]) -> None:
    message = message_of(*overrides)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("setting", ["samples.every=4", "samples.only=true", "samples.eval_every=1"])
def test_samples_without_pyarrow_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else find_spec(name))
    message = message_of(setting, "eval.interval=0")
    assert "samples" in message
    assert "pyarrow is not installed" in message
    assert "`data` extra" in message


@pytest.mark.parametrize(
    ("transport", "url", "host"),
    [
        ("tensor", "http://localhost:1", "127.0.0.1"),
        ("distributed", "http://127.0.0.1:1", "127.0.0.1"),
        ("distributed", "http://10.1.1.1:1", "10.1.1.2"),
    ],
)
def test_weights_can_be_sent_where_trainer_and_servers_reach_each_other(transport: str, url: str, host: str) -> None:
    config = load(*adopting(url), f"manager.weight_transport={transport}", f"system.host={host}")
    assert config.manager.weight_transport == transport


def test_all_wrong_settings_are_told_at_once() -> None:
    assert len(message_of("train_batch_size=30", "group_size=1", "agent.path=nowhere:X").splitlines()) == 3


def test_parallel_layout_gives_the_number_of_ranks() -> None:
    assert worker_grid(load()).workers == 1
    assert worker_grid(load("trainer.parallel=d16", "train_batch_size=64")).workers == 16


def test_config_survives_the_way_through_the_run_folder(tmp_path: Path) -> None:
    config = load("algorithm.policy_loss.params.clip_low=0.3", "rollout.filters=[{name: zero_variance}]", "seed=7")
    config.optimizer.lr, config.experiment_name, config.reward.args = (
        1e-7,
        "007: a '${name}'",
        {"1e3": None, "no": "no", "a": ["${", "1e3", "007", "12:30", "2026-11-28", "1_0", "~", "", "=", " x\n"]},
    )
    write_run_config(config, tmp_path)
    assert read_run_config(tmp_path) == config
    assert repr(read_run_config(tmp_path)) == repr(config)


@pytest.mark.parametrize(
    ("written", "reported"),
    [
        (
            "optimizer: {lr: 0.1, momentum: 0.9}\nsteps: 3",
            "unknown settings: optimizer.momentum, steps; was",
        ),
        ("optimizer: {lr: fast}", r"Expected `float`, got `str` - at `\$.optimizer.lr`"),
    ],
)
def test_a_run_folder_of_another_version_is_refused_by_its_settings(
    tmp_path: Path, written: str, reported: str
) -> None:
    (tmp_path / "config.yaml").write_text(written)
    with pytest.raises(ConfigError, match=reported):
        read_run_config(tmp_path)


def test_a_run_folder_of_an_earlier_version_is_read_by_the_names_of_then(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("checkpoint: {keep_last_step: false, interval: 7}\nseed: 3")
    config = read_run_config(tmp_path)
    assert (config.checkpoint.in_memory, config.checkpoint.interval, config.seed) == (False, 7, 3)


def test_every_setting_has_help_and_shows_up_in_it() -> None:
    for schema in SCHEMAS.values():
        for path, _, info in settings(schema):
            assert info.help, f"{path} has no help"
    text = experiment_help("async_ppo", load("max_head_offpolicyness=3"))
    assert "max_head_offpolicyness = 3" in text
    assert all(f"  {path} = " in text for path, _, _ in settings(ExperimentConfig))


def test_a_field_made_without_setting_has_no_info() -> None:
    groups = [item for item in fields(ExperimentConfig) if is_dataclass(item.type)]
    assert all(setting_info(item).help == "" for item in groups)


def test_help_names_the_choices_of_a_setting() -> None:
    text = experiment_help("async_ppo", load())
    assert "(str; one of drop, mask, wait)" in text
    assert "(str; one of kubernetes, local, ray, slurm, ssh)" in text
    first_sentences = {
        name: " ".join((policy.__doc__ or "").split(".")[0].split()) for name, policy in POLICIES.items()
    }
    assert all(first_sentences.values())
    routing = ". ".join(f"{name}: {sentence}" for name, sentence in first_sentences.items())
    assert f"chooses a request's server. {routing} (str; one of {', '.join(POLICIES)})" in text


def test_the_list_of_experiments_shows_each_with_its_summary() -> None:
    text = list_experiments(None)
    for name, summary in BUILT_IN.items():
        assert summary, f"{name}.yaml should begin with a comment that says what it is"
        assert name in text
        assert summary in text


def test_the_help_names_every_command() -> None:
    commands = help_page(None).partition("commands:\n")[2].partition("\n(")[0]
    modules = Path(commands_package.__file__).parent
    there = {path.stem for path in modules.iterdir() if path.suffix == ".py" or path.is_dir()} - {
        "__init__",
        "__pycache__",
    }
    assert set(COMMANDS) == {line.split()[0] for line in commands.splitlines()} == there


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncrl.launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=570, check=False)


def test_the_command_ends_with_2_and_one_message_before_any_process_starts(tmp_path: Path) -> None:
    ended = launch("async_ppo", f"fileroot={tmp_path}", "group_sise=8")
    assert ended.returncode == 2
    assert ended.stderr.count("error:") == 1
    assert "group_size" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "wanted"), [("--group_size=8", "group_size=8"), ("--optimizer.lr", "optimizer.lr=VALUE")]
)
def test_a_setting_with_dashes_is_told_how_it_is_written(
    given: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["async_ppo", given])
    assert f"unknown option {given}; a setting has no dashes: {wanted}" in capsys.readouterr().err


def test_the_command_is_called_asyncrl_too() -> None:
    command = [str(Path(sys.executable).parent / "asyncrl"), "--help"]
    code = f"import sys; sys.argv = {command!r}; from asyncrl.launch.__main__ import main; sys.exit(main())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=570, check=False)
    assert ended.stdout.splitlines()[0] == "asyncrl <experiment> [setting=value ...] [options]"
    as_a_module = launch("--help").stdout.replace("python -m asyncrl.launch ", "asyncrl ")
    assert as_a_module.splitlines() == ended.stdout.replace("python -m asyncrl.launch ", "asyncrl ").splitlines()
    assert "python -m asyncrl.launch" in ended.stdout


def test_cfg_job_prints_a_config_that_can_be_read_again(tmp_path: Path) -> None:
    ended = launch("async_ppo", "group_size=3", "--cfg", "job")
    assert ended.returncode == 0, ended.stderr
    (tmp_path / "config.yaml").write_text(ended.stdout)
    assert read_run_config(tmp_path).group_size == 3


def test_the_launcher_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, asyncrl.launch.__main__, asyncrl.rollout.process; "
        "import asyncrl.launch.train, asyncrl.launch.previews, asyncrl.launch.previews; "
        "import asyncrl.manager.process, asyncrl.master.process; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=570, check=False)
    assert ended.stdout.strip() == "[]", ended.stdout + ended.stderr


def test_help_is_as_wide_as_the_terminal_and_loses_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    text = help_page(None) + experiment_help("async_ppo", load())
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, fitted(text).splitlines())) <= 80
    assert fitted(text).split() == text.split()
    monkeypatch.setenv("COLUMNS", "100000")
    assert fitted(text) == text.rstrip("\n")
