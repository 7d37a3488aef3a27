"""Wrong inputs as users give them: each is refused before anything starts, with exit code 2 and one message.

The whole command runs in this process, up to where it would start processes; the rehearsal of the first row does too.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import msgspec
import pytest
from safetensors.torch import load as load_tensors
from safetensors.torch import save

from asyncrl.config import load
from asyncrl.config.run_dir import read_run_config
from asyncrl.launch import train
from asyncrl.launch.__main__ import main
from asyncrl.launch.before_start import models, rehearsal
from asyncrl.launch.before_start.rehearsal import rehearse as play
from asyncrl.models.folder_checks import WantedFolder
from asyncrl.weights import whole_folder

CODE = """
class Tagged:
    def __init__(self, tag):
        self.tag = tag

    def __call__(self, data, completion):
        return 0.0


class NotCallable:
    pass


class Plain:
    def reset(self):
        return "x"


value = 3


def number(data, completion):
    return float(len(completion))


def nothing(data, completion):
    return None


def text(data, completion):
    return "good"


def several(data, completion):
    return [1.0, 0.0]


def not_a_number(data, completion):
    return float("nan")


def raises(data, completion):
    raise RuntimeError("out of luck")


def no_such_column(data, completion):
    return float(data["solution"] == completion)


def answer_alone(completion):
    return 1.0


def yields(data, completion):
    yield 1.0


def seven(data, completion):
    return 7.0


def as_in_trl(prompts, completions, **kwargs):
    return [0.0 for _ in completions]


def as_in_verl(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0


async def silent(prompt, env, client):
    return 1.0


async def chats(prompt, env, client):
    await client.chat([{"role": "user", "content": "?"}])
    return 1.0


async def without_prompt(env, client):
    return 1.0


async def asks_wrongly(prompt, env, client):
    await client.generate(prompt.input_ids)
"""
ROW = {"prompt": "1+1=", "answer": "2"}
FILES: dict[str, str] = {
    "code.py": CODE,
    "syntax.py": "def score(data, completion)\n    return 1.0\n",
    "imports.py": "import no_such_package\n\n\ndef score(data, completion):\n    return 1.0\n",
    "fails.py": "raise RuntimeError('at import')\n\n\ndef score(data, completion):\n    return 1.0\n",
    "good.jsonl": json.dumps(ROW) + "\n",
    "held_out.jsonl": json.dumps(ROW) + "\n",
    "not_json.jsonl": json.dumps(ROW) + "\n{oops\n",
    "list.jsonl": json.dumps(ROW) + "\n[1]\n",
    "no_text.jsonl": json.dumps({"text": "1", "answer": "2"}) + "\n",
    "number.jsonl": json.dumps({"prompt": 3, "answer": "2"}) + "\n",
    "messages.jsonl": json.dumps({"prompt": [{"role": "user", "content": "1+1="}]}) + "\n",
    "no_role.jsonl": json.dumps({"prompt": [{"rol": "user", "content": "1+1="}]}) + "\n",
    "long.jsonl": json.dumps({"prompt": "1+" * 60, "answer": "2"}) + "\n",
    "letters.jsonl": json.dumps({"prompt": "Ω", "answer": "2"}) + "\n",
    "rows.csv": "prompt,answer\n1+1=,2\n",
    "garbage.parquet": "PAR1 garbage",
    "open.jinja": "{% for message in messages %}",
    "undefined.jinja": "{{ no_such_function(messages) }}",
    "blocked/async_ppo": "a file where the run's folder would be",
}
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def changed(**entries: Any) -> Callable[[bytes], bytes]:
    """Return what changes `entries` of a JSON file."""
    return lambda before: json.dumps(json.loads(before) | entries).encode()


def replaced(content: bytes) -> Callable[[bytes], bytes]:
    return lambda _: content


INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}).encode()
MODELS: dict[str, dict[str, Callable[[bytes], bytes] | None]] = {
    "no_config": {"config.json": None},
    "broken_config": {"config.json": replaced(b"{")},
    "no_type": {"config.json": replaced(b"{}")},
    "unknown_type": {"config.json": changed(model_type="qwen99")},
    "translator": {"config.json": changed(model_type="t5")},
    "code_inside": {"config.json": changed(model_type="mine", auto_map={"AutoModelForCausalLM": "m.Mine"})},
    "other_vocabulary": {"config.json": changed(vocab_size=100)},
    "other_width": {"config.json": changed(hidden_size=64)},
    "more_layers": {"config.json": changed(num_hidden_layers=4)},
    "renamed": {
        "model.safetensors": lambda whole: save({f"module.{n}": each for n, each in load_tensors(whole).items()})
    },
    "few_rows": {
        "config.json": changed(vocab_size=10),
        "model.safetensors": lambda whole: save(
            {name: each[:10] if "embed_tokens" in name else each for name, each in load_tensors(whole).items()}
        ),
    },
    "leftover": {"config.json": changed(quantization_config={"quant_method": "gptq", "bits": 4})},
    "adapter": {"config.json": None, "adapter_config.json": replaced(b'{"base_model_name_or_path": "its/base"}')},
    "few_positions": {"config.json": changed(max_position_embeddings=18)},
    "no_weights": {"model.safetensors": None},
    "cut_off": {"model.safetensors": lambda whole: whole[: len(whole) // 2]},
    "web_page": {"model.safetensors": replaced(b"<html>not found</html>")},
    "lfs_pointer": {"model.safetensors": replaced(LFS_POINTER)},
    "part_missing": {"model.safetensors.index.json": replaced(INDEX)},
    "no_tokenizer": {"tokenizer.json": None, "tokenizer_config.json": None},
    "broken_tokenizer": {"tokenizer.json": replaced(b"{"), "tokenizer_config.json": replaced(b'{"eos_token": "</s>"}')},
}
"""Copies of the tiny model, and what was done to their files; None: deleted."""

KINDS = "master_worker, model_worker, gserver_manager, generation_server"
ELSEWHERE = f"{{address: 127.0.0.1, runs: [{KINDS}]}}, {{name: HOST, address: 127.0.0.2, runs: [rollout_worker]}}"


def hosts(launcher: str, text: str) -> list[str]:
    return [f"system.launcher={launcher}", f"system.hosts=[{text}]"]


Case = tuple[Sequence[str], str]
COMMAND_LINE: list[Case] = [
    (["--seed=3"], "a setting has no dashes: seed=3"),
    (["--train_batch_size", "8"], "a setting has no dashes: train_batch_size=VALUE"),
    (["-m", "seed=1,2"], "unknown option -m"),
    (["seed"], "'seed' is not setting=value"),
    (["seed=3", "=", "4"], "'=' names no setting; write setting=value, without spaces"),
    (["seed=1,2"], "seed='1,2': several values; give one"),
    (["~seed"], "'~seed': a setting cannot be removed"),
    (["train_batchsize=8"], "did you mean 'train_batch_size'"),
    (["learning_rate=1e-5"], "a name of TRL, OpenRLHF; here it is 'optimizer.lr=1e-5'"),
    (["actor_rollout_ref.rollout.n=8"], "a name of verl, siiRL; here it is 'group_size=8'"),
    (["hydra.run.dir=/tmp"], "unknown setting 'hydra.run.dir'"),
    (["reward=HERE/code.py:number"], "reward is a group of settings and takes no value"),
    (["seed=${nope}"], "seed: Interpolation key 'nope' not found"),
    (["--config-dir", "HERE/nowhere"], "no such folder; give the one that holds your experiments"),
]
TYPES: list[Case] = [
    (["seed="], "seed='': a whole number is needed"),
    (["train_batch_size=eight"], "train_batch_size='eight': a whole number is needed"),
    (["train_batch_size=8.5"], "train_batch_size='8.5': a whole number is needed"),
    (["group_size=null"], "group_size='null': a whole number is needed"),
    (["logging.tensorboard=maybe"], "logging.tensorboard='maybe': neither true nor false"),
    (["trial_name=a\tb"], "trial_name='a\\tb'"),
    (["dataset.args=hello"], "dataset.args='hello': names with values are needed; write {NAME: VALUE}"),
    (
        ["rollout.filters=[zero_variance]"],
        "[0]='zero_variance': settings are needed; write {name: VALUE}",
    ),
    (
        ["rewards=[{path: 'HERE/code.py:number', name: a, weight: much}]"],
        "[0].weight='much': a number is needed",
    ),
    (["eval.sets=[{name: a, pth: HERE/good.jsonl}]"], "eval.sets[0].pth: no such setting, did you mean 'path'?"),
]
RANGES: list[Case] = [
    (["train_batch_size=0"], "train_batch_size=0: below the least allowed value; use 1"),
    (["max_head_offpolicyness=-1"], "max_head_offpolicyness=-1: below the least allowed value; use 0"),
    (["optimizer.lr=nan"], "optimizer.lr=nan: not a finite number"),
    (["system.stall_timeout_s=inf"], "system.stall_timeout_s=inf: not a finite number; give one (s)"),
    (
        ["system.lease_s=100", "system.stall_timeout_s=200"],
        "system.lease_s=100: a new GserverManager waits 300 s",
    ),
    (["rollout.sampling.max_new_tokens_from={0: 500}"], "max_new_tokens_from={0: 500}: 0: 500 is not valid"),
    (["rollout.sampling.temperature=nan"], "rollout.sampling.temperature=nan: not a finite number"),
    (["optimizer.beta1=1"], "optimizer.beta1=1.0: above the greatest allowed value; use 0.999999 or less"),
    (["optimizer.eps=0"], "optimizer.eps=0.0: below the least allowed value; use 1e-20 or more"),
    (["seed=99999999999999999999"], "above the greatest allowed value; use 2147483647 or less"),
    (
        ["rollout.sampling.allowed_token_ids='9-3'"],
        "rollout.sampling.allowed_token_ids='9-3': the range '9-3' is empty",
    ),
    (["rollout.sampling.allowed_token_ids='0-99999'"], "the vocabulary of"),
    (
        ["rollout.sampling.allowed_token_ids='1-3'", "generation.backend=sglang"],
        "rollout.sampling.allowed_token_ids='1-3': SGLang has no such parameter",
    ),
    (["rollout.sampling.top_p=2"], "rollout.sampling.top_p=2.0: above the greatest allowed value"),
    (["reward.timeout_s=0"], "reward.timeout_s=0.0: below the least allowed value"),
    (["reward.failure_reward=nan"], "reward.failure_reward=nan: no"),
]
CHOICES: list[Case] = [
    (["on_stale=droop"], "on_stale='droop': not a choice, did you mean 'drop'?"),
    (["generation.backend=vllm"], "generation.backend='vllm': not a choice; choose one of embedded, sglang"),
    (["model.dtype=fp16"], "model.dtype='fp16': not a choice"),
    (["system.launcher=k8s"], "system.launcher='k8s': not a choice"),
    (["algorithm.policy_loss.name=gspoo"], "did you mean 'gspo'?"),
    (["algorithm.policy_loss.params={epsilon: 0.2}"], "has no parameter 'epsilon'; it takes clip_low"),
    (["algorithm.policy_loss.params={clip_low: big}"], "parameter 'clip_low' is 'big' (str), expected float"),
    (["algorithm.policy_loss.name=HERE/code.py:nope"], "code.py defines no 'nope'"),
    (["algorithm.advantage.name=HERE/code.py:number"], "takes (data, completion) by position, and a advantage is"),
    (["algorithm.graph=grppo"], "algorithm.graph='grppo': no such graph, did you mean 'grpo'?"),
    (["rollout.filters=[{name: zero_var}]"], "unknown filter 'zero_var', did you mean 'zero_variance'?"),
    (["rollout.shaping=[{name: overlong}]"], "needs params.max_length"),
    (["algorithm.plugins=[no_such_module]"], "plug-in module 'no_such_module' was not found"),
    (["buffer.order.path=nope:f"], "buffer.order.path='nope:f': no module or file 'nope'"),
    (["rollout.columns=[price]"], "'price' is not a column"),
]
COMBINATIONS: list[Case] = [
    (["train_batch_size=10", "trainer.ppo_minibatches=4"], "not divisible by trainer.ppo_minibatches=4; use 8 or 12"),
    (["group_size=1"], "compares the episodes of a group"),
    (["rollout.sampling.temperature=0"], "greedy samples of a group are all the same"),
    (["algorithm.advantage.name=gae"], "it needs a critic's values"),
    (["algorithm.prox=behave"], "algorithm.prox='behave': with max_head_offpolicyness=4"),
    (["algorithm.kl_target=0.1"], "algorithm.kl_coef=0 is multiplied to reach it, and stays 0"),
    (["eval.n_samples=4"], "greedy answers to a prompt are all the same"),
    (["checkpoint.keep_best=eval/held/accuracy"], "did you mean 'eval/held_out/accuracy'?"),
    (["manager.weight_transport=tensor"], "takes weights from disk only"),
    (["generation.sglang.urls=['http://127.0.0.1:9']"], "set generation.backend=sglang, or leave them out"),
    (["moe.replay_routing=true"], "qwen2 is a dense model"),
    (["model.lora.rank=4", "model.lora.targets=[q_projj]"], "is called 'q_projj'; use some of"),
    (["optimizer.warmup_steps=5", "optimizer.warmup_ratio=0.1"], "give one of them"),
    (["dataset.curriculum.low=0.9", "dataset.curriculum.high=0.1"], "so that no prompt is within; exchange them"),
    (["profile.steps=[1000000]"], "1000000 is not a step of the run"),
    (["my={scale: 2}"], "name your dataclass: my_class=FILE.py:NAME"),
    (["total_epochs=0.1"], "that is less than one step of train_batch_size=32"),
    (["trial_name=a/b"], "becomes a folder's name"),
]
LAYOUTS: list[Case] = [
    (["trainer.parallel=2x2"], "trainer.parallel='2x2': not a layout; write d<N>"),
    (["trainer.parallel=d0"], "trainer.parallel='d0': not a layout"),
    (["trainer.parallel=t3"], "qwen2 cannot be cut into 3 tensor slices"),
    (["trainer.parallel=p5"], "2 layers are fewer than the 5 stages; use p2 or less"),
    (["trainer.device=cuda"], "trainer.device='cuda'"),
    (["generation.max_running_requests=2"], "a group of group_size=8 does not fit; use 8 or more"),
    (["trainer.buffer_capacity=1"], "that may be under way; use 160 or more"),
]
LIMITS: list[Case] = [
    (["generation.context_length=40"], "shorter than dataset.max_prompt_tokens"),
    (["generation.max_total_tokens=20"], "generation.max_total_tokens=20: one sample may take 48; use 48 or more"),
    (["model.path=HERE/few_positions"], "has 18 positions (max_position_embeddings), and the longest prompt"),
    (["model.path=HERE/few_positions", "rollout.sampling.max_new_tokens=200"], "takes 18 tokens, prompt and answer"),
    (["dataset.path=HERE/long.jsonl", "dataset.max_prompt_tokens=16"], "none of 1 rows makes a prompt; row 0"),
]
MODEL: list[Case] = [
    (["model.path=HERE/nowhere"], "no such folder, so there is no config.json to read"),
    (["model.path=HERE/good.jsonl"], "a file, not a folder; give the folder of a downloaded model"),
    *[
        ([f"model.path=HERE/{name}"], says)
        for name, says in [
            ("no_config", "no Hugging Face model there (no config.json)"),
            ("broken_config", "its config.json cannot be read"),
            ("no_type", "names no model_type"),
            ("unknown_type", "has no language model of type 'qwen99'"),
            ("translator", "has no language model of type 't5' that answers"),
            ("code_inside", "its architecture 'mine' is code in that folder, which is not executed"),
            ("other_vocabulary", "not [100, "),
            ("other_width", ", 64], model.layers.0.input_layernorm.weight is ["),
            ("more_layers", "`num_hidden_layers` (4) must be equal to the number of `layer_types`"),
            ("renamed", "rename the tensors (without 'module.')"),
            ("few_rows", "has token 14, and the model's embeddings have 10 rows"),
            ("leftover", "has quantization_config (gptq), and its weights are plain; remove quantization_config"),
            ("adapter", "an adapter (peft) of the base model 'its/base', not a model; merge it into its base"),
            ("no_weights", "it holds no weights"),
            ("cut_off", "model.safetensors was cut off: it has"),
            ("web_page", "model.safetensors is no safetensors file, or was cut off (22 bytes)"),
            ("lfs_pointer", "model.safetensors is a pointer of Git LFS"),
            ("part_missing", "names model-00001-of-00002.safetensors, which is not there (1 of 1 missing)"),
            ("no_tokenizer", "its tokenizer cannot be used"),
            ("broken_tokenizer", "its tokenizer cannot be used"),
        ]
    ],
    (["algorithm.kl_coef=0.1", "algorithm.reference.path=HERE/cut_off"], "algorithm.reference.path="),
    (
        ["algorithm.kl_coef=0.1", "algorithm.reference.path=HERE/renamed"],
        "algorithm.reference.path='HERE/renamed': its",
    ),
    (
        ["algorithm.graph=ppo", "algorithm.advantage.name=gae", "algorithm.critic.path=HERE/renamed"],
        "algorithm.critic.path='HERE/renamed': its files lack",
    ),
    (
        ["algorithm.teachers=[{name: t, path: HERE/renamed}]"],
        "algorithm.teachers: 't': path='HERE/renamed': its files lack",
    ),
    (["policies=[{name: p, path: HERE/renamed}]"], "policies: 'p': path='HERE/renamed': its files lack"),
    (["model.path=null", "model.base_experiment=sftt"], "model.base_experiment='sftt': no experiment 'sftt'"),
    (["model.path=null", "model.base_experiment=async_ppo"], "it is not supervised; use sft or one like it"),
]
DATA: list[Case] = [
    (["dataset.path=HERE/nowhere.jsonl"], "no such file; give a data file, or a dataset class"),
    (["dataset.path=HERE/rows.csv"], "give a file that ends in .jsonl or .parquet"),
    *[
        ([f"dataset.path=HERE/{name}"], says)
        for name, says in [
            ("not_json.jsonl", "not_json.jsonl:2 is not JSON"),
            ("list.jsonl", "list.jsonl:2 is a JSON list: write one object per line"),
            ("no_text.jsonl", "has no text in any of the fields prompt"),
            ("number.jsonl", "has no text in any of the fields prompt"),
            ("no_role.jsonl", "message 0 is not an object with a role"),
            ("messages.jsonl", "the prompt is messages and there is no chat template; set dataset.chat_template"),
            ("letters.jsonl", "has the character 'Ω', the tokenizer knows"),
            ("garbage.parquet", "give a whole Parquet or Arrow file"),
            ("latin1.jsonl", "is not UTF-8"),
        ]
    ],
    (["eval.path=null"], "evaluation would take the training file"),
    (["dataset.fields={prompt: question}"], "has no 'question'"),
    (["dataset.path=asyncrl.plugins.datasets.arithmetic:Nope"], "defines no 'Nope'"),
    (["dataset.args={levels: 3}"], "has no parameter 'levels'"),
    (["dataset.sources=[{path: HERE/good.jsonl, weight: 0}]"], "no share; give a number above 0"),
    (
        ["dataset.path=HERE/long.jsonl", "dataset.sources=[{path: HERE/good.jsonl}]"],
        "set together with dataset.sources",
    ),
    (["dataset.chat_template=HERE/nowhere.jinja"], "no such file; give auto, off, or a Jinja file"),
    (["dataset.chat_template=HERE/open.jinja"], "the chat template is no Jinja template"),
    (["dataset.chat_template=HERE/undefined.jinja"], "'no_such_function' is undefined"),
    (["dataset.system_prompt=hello"], "has no chat template to take it"),
]
REWARDS: list[Case] = [
    *[
        ([f"reward.path=HERE/code.py:{name}"], says)
        for name, says in [
            ("nothing", "nothing returned None, which leaves a row to other rewards"),
            ("text", "text returned 'good'; a reward is a finite number"),
            ("several", "several returned [1.0, 0.0]; a reward is a finite number"),
            ("not_a_number", "not_a_number returned nan; a reward is a finite number"),
            ("raises", "raises: RuntimeError: out of luck"),
            ("no_such_column", "no_such_column: KeyError: 'solution'"),
            ("answer_alone", "takes 1 positional argument but 2 were given"),
            ("yields", "yields returned <generator object"),
            ("as_in_trl", "it has the form of TRL's rewards"),
            ("as_in_verl", "it has the form of verl's rewards"),
            ("nope", "code.py defines no 'nope'; it has:"),
            ("NotCallable", "its instances cannot be called; give the class a __call__"),
            ("Tagged", "needs args.tag"),
            ("value", "it is a int; name a class or function"),
        ]
    ],
    (["reward.path=HERE/code.py:number", "reward.args={scale: 2}"], "has no parameter 'scale'"),
    (["reward.path=HERE/code.py:seven", "reward.verdict=true"], "is declared a verdict and returned 7"),
    (["reward.path=HERE/code.py"], "the name follows a colon"),
    (["reward.path=my.rewards.score"], "write my.rewards:score"),
    (["reward.path=HERE/nowhere.py:score"], "no module or file"),
    (["reward.path=HERE/syntax.py:score"], "cannot be read as Python: expected ':'"),
    (["reward.path=HERE/imports.py:score"], "no module 'no_such_package'"),
    (["reward.path=HERE/fails.py:score"], "importing it failed in HERE/fails.py:1: RuntimeError: at import"),
    (["rewards=[{path: 'HERE/code.py:number'}]"], "rewards[0].name='': names the metric"),
    (
        ["reward.path=HERE/code.py:number", "rewards=[{path: 'HERE/code.py:number', name: a}]"],
        "reward: set together with rewards",
    ),
    (["eval.reward.path=HERE/code.py:nothing"], "eval: reward HERE/code.py:nothing returned None"),
]
AGENTS: list[Case] = [
    (["rollout.rehearse=false", "agent.args={nope: 1}"], "has no parameter 'nope'"),
    (["agent.path=HERE/code.py:silent"], "returned the reward 1.0 without asking the policy"),
    (["agent.path=HERE/code.py:chats"], "there is no chat template to put messages into tokens"),
    (["agent.path=HERE/code.py:without_prompt"], "an episode is run(prompt, env, client)"),
    (["agent.path=HERE/code.py:asks_wrongly"], "client.generate takes a GenerationRequest, not a tuple"),
    (["agent.path=HERE/code.py:Plain"], "it is not an asyncrl.api.Agent"),
    (["agent.run_in=loop"], "user agents never run on the worker's own event loop; use auto"),
    (["env.path=HERE/code.py:Plain"], "it is not an asyncrl.api.Environment"),
    (["env.path=gymnasium:NoSuchEnv-v9"], "NoSuchEnv"),
    (["env.vectorized=true"], "is no environment of gymnasium's"),
    (["tools=[{path: 'HERE/code.py:number'}]"], "this agent calls no tools"),
    (["tools=[{path: 'HERE/code.py:nope'}]", "agent.path=HERE/code.py:chats"], "tools[0].path="),
    (["mcp=[{name: a, command: no-such-program}]"], "mcp[0].command='no-such-program': no such program"),
]
PLACES: list[Case] = [
    (["system.host=10.99.99.99"], "no interface of this machine has that address; use one of"),
    (["system.host=no.such.host.invalid"], "neither an IP address nor a name of an IPv4 one"),
    (["rollout.endpoint.host=10.99.99.99"], "rollout.endpoint.host='10.99.99.99': not an address of this machine"),
    (["rollout.endpoint.host=0.0.0.0"], "rollout.endpoint.host='0.0.0.0': stands for all addresses"),
    (
        ["rollout.endpoint.advertise='http://box:8'"],
        "rollout.endpoint.advertise='http://box:8': no host name or address",
    ),
    (["rollout.endpoint.port=8123", "rollout.workers=2"], "rollout.endpoint.port=8123: one RolloutWorker of a host"),
    (["system.launcher=ssh"], "system.launcher=ssh needs to know the hosts"),
    (hosts("local", ELSEWHERE), "starts processes on this host only"),
    (hosts("ssh", "{address: 127.0.0.1, runs: [model_worker]}"), "system.hosts: none runs master_worker"),
    (hosts("ssh", f"{{address: 127.0.0.1, runs: [trainer, rollout_worker, {KINDS}]}}"), "='trainer': not a choice"),
    (hosts("ssh", f"{ELSEWHERE}, {{address: 127.0.0.3, runs: [rollout_worker]}}"), "join the entries"),
    (hosts("ssh", ELSEWHERE.replace("]}, {", "], gpus: ['0', '0']}, {")), "system.hosts[0].gpus: '0' is there 2 times"),
    (hosts("ssh", ELSEWHERE.replace("]}, {", "], gpus: [all]}, {")), "system.hosts[0].gpus: 'all' is no GPU"),
    (hosts("ssh", ELSEWHERE.replace("HOST", "host.invalid")), "ssh knows no host of this name"),
    ([*hosts("ray", ELSEWHERE), "system.launcher_args=['--address=127.0.0.1:9']"], "no Ray cluster answers there"),
    (hosts("kubernetes", ELSEWHERE), "system.kubernetes.image='': the pods need one"),
    (["system.shared_filesystem=false"], "system.hosts is empty, so that everything is on one host"),
    (["system.name_resolve=etcd3", "system.name_resolve_root=etcd"], "system.name_resolve_root='etcd': not valid"),
    (["system.etcd.user=me"], "is for system.name_resolve=etcd3"),
    (["system.name_resolve_root=HERE/good.jsonl"], "and this is a file; give a folder"),
    (["generation.backend=sglang", "generation.sglang.python=HERE/python"], "not an executable"),
    (["generation.backend=sglang", "generation.sglang.python=/bin/false"], "sglang is not installed for this"),
    (["generation.backend=sglang", "generation.sglang.urls=['localhost:3000']"], "give http://host:port"),
    (["generation.backend=sglang", "generation.sglang.urls=['http://127.0.0.1:9']"], "no server answers there"),
    (["fileroot="], "names no folder; give one"),
    (["fileroot=HERE/good.jsonl"], "good.jsonl is not a folder one can write to"),
    (["fileroot=/proc/asyncrl"], "/proc is not a folder one can write to"),
    (["fileroot=HERE/blocked"], "HERE/blocked/async_ppo is not a folder one can write to"),
    (["samples.replay=HERE/nowhere", "eval.interval=0"], "no folder of kept samples (*.parquet)"),
]
GROUPS = (COMMAND_LINE, TYPES, RANGES, CHOICES, COMBINATIONS, LAYOUTS, LIMITS, MODEL, DATA, REWARDS, AGENTS, PLACES)
TABLE = [case for group in GROUPS for case in group]


COMPOSED = functools.cache(load._composed)
"""The experiment as its files say: composing it anew for each input would take most of the time."""


class Started(Exception):
    """The command would have started processes."""


class InThisProcess:
    """Stands for the process of the rehearsal, without its start."""

    pid = 2**22 + 1  # above any

    def __init__(self, argv: Sequence[str], **_: Any) -> None:
        folder = Path(argv[-1])
        asyncio.run(play(read_run_config(folder))).write(folder)

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None: ...


class CheckedHere:
    """Stands for the process that asks transformers whether models are whole, without its start."""

    def __init__(self, argv: Sequence[str], stdin: BinaryIO, stdout: BinaryIO, **_: Any) -> None:
        wanted = msgspec.json.decode(stdin.read(), type=list[WantedFolder])
        stdout.write(msgspec.json.encode(list(whole_folder._faults(wanted))))

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None: ...


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The files and models that the table names."""
    folder = tmp_path_factory.mktemp("here")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    (folder / "latin1.jsonl").write_bytes('{"prompt": "é"}'.encode("latin1"))
    for name, changes in MODELS.items():
        shutil.copytree(tiny_model, folder / name)
        for file, change in changes.items():
            path = folder / name / file
            if change is None:
                path.unlink()
            else:
                path.write_bytes(change(path.read_bytes() if path.exists() else b""))
    return folder


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object) -> int:
        raise Started

    monkeypatch.setattr(train.Launcher, "run", run)
    played_here = SimpleNamespace(Popen=InThisProcess, DEVNULL=None, STDOUT=None, TimeoutExpired=TimeoutError)
    monkeypatch.setattr(rehearsal, "subprocess", played_here)
    monkeypatch.setattr(models, "subprocess", SimpleNamespace(Popen=CheckedHere, TimeoutExpired=TimeoutError))
    monkeypatch.setattr(load, "_composed", COMPOSED)


def command(here: Path, model: Path, fileroot: Path) -> list[str]:
    """A command that is right."""
    data = [f"dataset.path={here / 'good.jsonl'}", f"eval.path={here / 'held_out.jsonl'}"]
    short = ["rollout.sampling.max_new_tokens=16", "eval.sampling.max_new_tokens=16", "eval.size=8"]
    return ["async_ppo", f"model.path={model}", f"fileroot={fileroot}", *data, *short]


@pytest.mark.parametrize(("arguments", "says"), TABLE, ids=[" ".join(arguments)[:70] for arguments, _ in TABLE])
def test_a_wrong_input_is_refused_before_anything_starts(
    arguments: Sequence[str],
    says: str,
    here: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        code = main(
            [
                *command(here, tiny_model, tmp_path / "runs"),
                *(argument.replace("HERE", str(here)) for argument in arguments),
            ]
        )
    except SystemExit as left:  # by argparse
        code = int(left.code or 0)
    reported = capsys.readouterr().err
    assert code == 2, reported
    assert says.replace("HERE", str(here)) in reported
    assert "Traceback" not in "".join(line for line in reported.splitlines(keepends=True) if "error: " in line)
    assert not (tmp_path / "runs" / "async_ppo").exists()


def test_wrong_arguments_of_code_are_refused_by_an_evaluation(
    here: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, _, _, *settings = command(here, tiny_model, tmp_path)
    evaluated = ["eval", str(tiny_model), "--experiment", "async_ppo", *settings]
    assert main([*evaluated, "agent.args={nope: 1}"]) == 2
    assert "agent.args={'nope': 1}: " in capsys.readouterr().err
    with pytest.raises(Started):
        main(evaluated)


def test_what_is_right_would_start(here: Path, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(Started):
        main(command(here, tiny_model, tmp_path))


def test_a_warm_up_that_outlasts_the_run_is_warned_of(
    here: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Started):
        main([*command(here, tiny_model, tmp_path), "optimizer.warmup_steps=100000"])
    assert "optimizer.warmup_steps=100000: the run has 400 optimizer steps" in capsys.readouterr().err


def test_without_a_home_a_path_below_it_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container with an arbitrary user id."""

    def nobody(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    for arguments in (["async_ppo"], ["doctor", "~/run"], ["async_ppo", "fileroot=/tmp", "model.path=~/model"]):
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "HOME is not set" in line
        assert "set HOME to a folder of this user, or give whole paths" in line


@pytest.mark.parametrize("command", ["doctor", "dashboard", "audit", "trace", "clean", "show", "join", "eval"])
def test_another_users_run_is_refused_in_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for name in ("is_dir", "is_file", "exists", "stat", "open", "iterdir"):
        monkeypatch.setattr(Path, name, refuse)
    assert main([command, str(tmp_path), *(["--kind", "rollout_worker"] if command == "join" else [])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Permission denied" in line


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_closed_standard_streams_are_those_of_no_pipe_that_is_opened_later(closed: tuple[int, ...]) -> None:
    program = f"""
import os, sys
told = os.dup(1)
for number in {closed}:
    os.close(number)
if 1 in {closed}:
    sys.stdout = None
from asyncrl.launch.__main__ import main
main(["--cfg", "job", "async_ppo"])
os.write(told, b"%d" % min(os.pipe()))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert int(ended.stdout) > 2, ended.stderr


def test_ctrl_c_while_the_command_still_imports_its_modules_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        """An import during which Ctrl-C is pressed."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "asyncrl.config.load":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "asyncrl.config.load")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    assert main(["async_ppo"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_a_machine_without_room_for_temporary_files_or_processes_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def no_folder() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    def no_process(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "gettempdir", no_folder)
        patched.setenv("TMPDIR", "/nowhere")
        assert main(["async_ppo", f"fileroot={tmp_path}"]) == 2
        assert "TMPDIR='/nowhere': this user can write neither there nor" in capsys.readouterr().err
    monkeypatch.setattr("asyncrl.launch.__main__._main", no_process)
    assert main(["async_ppo"]) == 2
    assert "ulimit -u" in capsys.readouterr().err
    monkeypatch.setattr("asyncrl.launch.__main__._main", lambda _: threading.Thread(target=print).start())
    monkeypatch.setattr(threading, "_start_new_thread", no_thread)
    assert main(["async_ppo"]) == 2
    assert "ulimit -u" in capsys.readouterr().err
