"""Every engine that can runs on a second device: no operator mixes devices, and no hot path makes the host wait for it.

The device is pretended (`pretended_device`), so this runs without a GPU.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ChoiceConfig, Dtype
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.engine_io import GenerationInput, Job, SamplingSpec
from asyncrl.master.graph.builtin import load_graph
from asyncrl.models.weights.checkpoints.writer import CheckpointWriter
from asyncrl.runtime.ranks import Ranks
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.step_batch import build_step_batch
from asyncrl.trainer.engines.base import PolicyOutputs
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, find_function, run_call
from asyncrl.trainer.model import layout_parity
from asyncrl.trainer.model.gradient_checkpointing import _Moved
from asyncrl.trainer.parallel.rank_position import World
from asyncrl.trainer.rank.roles import build_rank
from asyncrl.trainer.rank.training_rank import TrainingRank
from asyncrl.trainer.settings import AttentionImplementation, KeptOn, TeacherConfig

from ..late_stream import LateStream

VOCABULARY = 97
PIECE = 4096
LIMIT_S = 60.0
CPU = torch.device("cpu")


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pretended = _load("pretended_device")
DEVICE: torch.device = pretended.DEVICE


def config_of_model(layers: int = 2) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of_model()).save_pretrained(str(folder))
    return folder


def trajectories() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    made = []
    for order in range(4):
        prompt = rng.integers(0, VOCABULARY, 12)
        samples = []
        for episode in range(4):
            new = int(rng.integers(8, 40))
            mask = (np.arange(12 + new) >= 12).astype(np.uint8)
            tokens = np.concatenate([prompt, rng.integers(0, VOCABULARY, new)]).astype(np.int32)
            logprobs, versions = (-4.6 * mask).astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
            samples.append(Sample(tokens, mask, logprobs, versions, float(episode % 2), episode=episode))
        made.append(Trajectory(f"r{order}", f"p{order}", order, tuple(samples)))
    return made


def configured(folder: Path, *, micro_batch: int, **settings: Any) -> ExperimentConfig:
    config = ExperimentConfig(train_batch_size=4, group_size=4)
    config.model.path, config.model.dtype = str(folder), Dtype.float32
    config.trainer.ppo_minibatches, config.trainer.tokens_per_micro_batch = 2, micro_batch
    for name, value in settings.items():
        *path, last = name.split("__")
        group: Any = config
        for part in path:
            group = getattr(group, part)
        setattr(group, last, value)
    return config


def ranks_on(config: ExperimentConfig, device: torch.device) -> TrainingRank:
    return build_rank(config, load_graph(config), World(), device)


def step(config: ExperimentConfig, rank: TrainingRank, version: int, device: torch.device) -> StatValues:
    batch = build_step_batch(trajectories(), [0, 1, 0, 1], version=version, num_minibatches=2, device=device)
    stats: StatValues = {}
    for call in load_graph(config).order():
        context = CallContext(
            name=call.name,
            role=call.role,
            reads=call.reads,
            writes=call.writes,
            args=call.args,
            config=config,
            engines=rank.engines,
            ranks=rank.world.place(call.role).data,
            state=rank.state,
        )
        stats |= run_call(find_function(call.function), context, batch)
    return stats


EAGER = AttentionImplementation.eager
FLEX = AttentionImplementation.flex_attention
VARIABLE = "the rule of the variable-length kernel"
TEACHER = "teacher"
CASES: dict[str, dict[str, Any]] = {
    "tree": {},
    "packed": {"trainer__share_prefixes": False},
    VARIABLE: {"trainer__share_prefixes": False},
    "flex": {"model__attn_implementation": FLEX},
    "padded": {"model__attn_implementation": EAGER, "trainer__share_prefixes": False},
    "checkpointing": {"trainer__gradient_checkpointing": True},
    "activations on the host": {"trainer__gradient_checkpointing": True, "trainer__activations_on": KeptOn.host},
    "whole distributions": {"algorithm__kl_coef": 0.1, "algorithm__kl": ChoiceConfig(name="full")},
    "critic": {"algorithm__graph": "ppo", "algorithm__advantage": ChoiceConfig(name="gae")},
    "adapters": {"model__lora__rank": 4},
    "dapo": {"algorithm__graph": "dapo", "algorithm__entropy_coef": 0.01},
    TEACHER: {},
    "moments on the host": {"optimizer__moments_on": KeptOn.host},
    "off-loaded": {"trainer__offload": True, "algorithm__kl_coef": 0.1},
}


@pytest.mark.parametrize("case", CASES)
def test_a_train_step_on_a_device_gives_the_cpus_numbers_and_waits_for_it_as_often_with_many_micro_batches(
    model_dir: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(model_dir, micro_batch=2000, **CASES[case])
    if case == VARIABLE:
        monkeypatch.setattr(layout_parity, "kernel_exists", lambda *_: True)
    if case == TEACHER:
        config.algorithm.teachers = [TeacherConfig(name="own", path=str(model_dir))]
    ranks = {device: ranks_on(config, device) for device in (CPU, DEVICE)}
    steps = []
    for version, micro_batch in enumerate((2000, 2000, 90)):
        for rank in ranks.values():
            for engine in rank.engines.values():
                engine._budget = micro_batch
        expected = step(config, ranks[CPU], version, CPU)
        with pretended.watched() as watch:
            found = step(config, ranks[DEVICE], version, DEVICE)
        steps.append(watch)
        assert expected["optimizer/steps"] == 2.0
        for name in ("loss", "grad_norm", "entropy"):
            assert found[name] == pytest.approx(expected[name], abs=1e-5), name
    few, many = steps[1:]
    assert sum(many.operators.values()) > 2 * sum(few.operators.values()), "more micro-batches were computed"
    more = many.waits - few.waits
    if case == "padded":  # transformers looks at the positions as it draws its masks
        more = Counter({where: count for where, count in more.items() if "self._trunk(" not in where[1]})
    assert not more, f"waits that come with micro-batches:\n{pretended.Watch(waits=more).lines()}"


def test_inputs_of_layers_that_wait_on_the_host_have_left_the_device(model_dir: Path) -> None:
    settings = {"trainer__gradient_checkpointing": True, "trainer__activations_on": KeptOn.host}
    policy = ranks_on(configured(model_dir, micro_batch=200, **settings), DEVICE).policy("actor")
    batch = build_step_batch(trajectories(), [0] * 4, version=0, num_minibatches=1, device=DEVICE)
    waiting: list[list[tuple[str, bool]]] = []

    def loss(_: MicroBatch, outputs: PolicyOutputs) -> tuple[torch.Tensor, dict[str, Any]]:
        moved = [each for each in gc.get_objects() if isinstance(each, _Moved)]
        waiting.append(sorted((each._host.device.type, each._here is not None) for each in moved))
        return outputs.logprobs_N.sum(), {}

    policy.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), loss)
    assert len(waiting) > 1
    assert waiting == [[("cpu", False), ("cpu", True)]] * len(waiting), "of two layers, the last one's is not given up"


def test_the_training_thread_begins_a_checkpoint_without_a_wait_and_reads_behind_one_piece_of_it(
    model_dir: Path, tmp_path: Path
) -> None:
    """On a GPU what is read comes after all copies to the host that are queued, by whichever thread."""
    config, stream = configured(model_dir, micro_batch=2000), LateStream()
    rank = ranks_on(config, DEVICE)
    step(config, rank, 0, DEVICE)
    parts = {"actor": rank.engines["actor"]}
    writer = CheckpointWriter(parts, ["actor"], Ranks(), in_memory=True, copies=stream.copies(PIECE))
    behind: list[int] = []
    stream.release.clear()
    with pretended.watched() as beginning:
        writer.begin(tmp_path / "v1", version=1, state={})
    with pretended.watched() as watch:
        watch.at_wait = lambda: behind.append(stream.queued_bytes)
        step(config, rank, 1, DEVICE)
    stream.release.set()
    writer.share(tmp_path / "v1").result(LIMIT_S)
    writer.close()
    assert not beginning.waits, beginning.lines()
    assert "device" in stream.waits, "the optimizer's step comes after the copies"
    assert behind, "the step reads numbers"
    assert max(behind) <= PIECE


def job(number: int, prompt: Sequence[int], new_tokens: int, **sampling: Any) -> Job:
    specs = [SamplingSpec(max_new_tokens=new_tokens, seed=100 * number + each, **sampling) for each in range(4)]
    return Job(tuple(GenerationInput(f"r{number}-{each}", tuple(prompt), spec) for each, spec in enumerate(specs)))


def engine_on(device: torch.device, layers: int = 2) -> GenerationEngine:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of_model(layers))
    torch.nn.Module.to(model, device)
    return GenerationEngine(model, max_running_requests=16, max_model_len=128, max_total_tokens=1024)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["plain", "top_p"])
def test_the_embedded_engine_on_a_device_writes_the_cpus_tokens_and_waits_twice_a_token(
    sampling: dict[str, Any],
) -> None:
    """Waits come with a step, not with the layers or rows: which rows are finished, and the tokens at the end."""
    written = []
    for device in (CPU, DEVICE):
        engine = engine_on(device)
        jobs = [job(number, range(5 + number, 25), 20, **sampling) for number in range(3)]
        for each in jobs:
            engine.submit(each)
        for _ in range(8):  # until samples have parted: until then they share rows, which are looked at
            engine.step()
        with pretended.watched() as watch:
            for _ in range(4):
                engine.step()
        while engine.step():
            pass
        written.append([output.output_ids for each in jobs for output in each.future.result(timeout=0)])
    assert written[0] == written[1]
    assert sum(watch.waits.values()) <= 2 * 4, watch.lines()


def test_a_token_of_the_embedded_engine_takes_thirty_operators_a_layer() -> None:
    """On a GPU each is a launch: the figure is in docs/gpu.md."""
    found = []
    for layers in (2, 4):
        engine = engine_on(DEVICE, layers)
        for number in range(3):
            engine.submit(job(number, range(5 + number, 25), 20))
        for _ in range(8):  # as above
            engine.step()
        with pretended.watched() as watch:
            for _ in range(4):
                engine.step()
        found.append(sum(watch.operators.values()))
    assert (found[1] - found[0]) / 2 / 4 <= 30
