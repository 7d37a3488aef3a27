"""Train steps and embedded engines for tests on a device, as tables of settings. Torch knows the device already.

`tests/device` tries them on a pretended device, `tests/gpu` on a GPU. Both compare with the same on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncrl.algorithms.registry import KLIn, ValueNormalisation
from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ChoiceConfig, Dtype
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import GenerationInput, GenerationOutput, SamplingSpec
from asyncrl.manager.settings import PolicyConfig
from asyncrl.master.graph import POLICY_READS, Call, Graph, load_graph, reference
from asyncrl.models.pictures import Pictures
from asyncrl.trainer.batches.step_batch import attach, build_step_batch, detach, scores_of
from asyncrl.trainer.functions.model_functions import StatValues
from asyncrl.trainer.messages import RunCall
from asyncrl.trainer.rank.requests import ModelCalls, parts_of_policies
from asyncrl.trainer.rank.training_rank import TrainingRank
from asyncrl.trainer.settings import AttentionImplementation, KeptOn, ReferenceMode, TeacherConfig, VisionMode
from tests.tiny_vlm import KINDS, make_folder, picture, render
from tests.unit.models.test_every_architecture import ARCHITECTURES, COMMON
from tests.vlm_batches import vlm_trajectories

VOCABULARY: int = COMMON["vocab_size"]
EXPERTS, EXPERTS_PER_TOKEN, LAYERS = 4, 2, COMMON["num_hidden_layers"]
PLAIN, REWARD_MODEL, PICTURE_MODEL = "Qwen2", "a reward model", "qwen2_vl"


def model_of(name: str = PLAIN, **settings: Any) -> PreTrainedModel:
    """A causal language model with tiny random weights, `name` as in docs/models.md."""
    model_type, own = ARCHITECTURES[name]
    shape = {key: value for key, value in {**COMMON, **own, **settings}.items() if value is not None}
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**shape))
    return model.eval()


class Folders:
    """Folders of tiny models under `root`, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, name: str = PLAIN) -> Path:
        folder = self._root / name.replace(" ", "_")
        if folder.exists():
            return folder
        if name in KINDS:
            return make_folder(name, folder)
        model = model_of() if name == REWARD_MODEL else model_of(name)
        if name == REWARD_MODEL:
            model.config.num_labels = 1
            model = AutoModelForSequenceClassification.from_config(model.config)
        model.save_pretrained(str(folder))
        return folder


# What a step trains on.


def trajectories(vocabulary: int = VOCABULARY) -> list[Trajectory]:
    """Four groups of four samples with a common prompt, of 20 to 52 tokens."""
    rng = np.random.default_rng(0)
    made = []
    for order in range(4):
        prompt = rng.integers(3, vocabulary, 12)
        samples = []
        for episode in range(4):
            new = int(rng.integers(8, 40))
            mask = (np.arange(12 + new) >= 12).astype(np.uint8)
            tokens = np.concatenate([prompt, rng.integers(3, vocabulary, new)]).astype(np.int32)
            logprobs = (-np.log(vocabulary) * mask).astype(np.float32)
            versions = np.where(mask, 0, -1).astype(np.int32)
            samples.append(Sample(tokens, mask, logprobs, versions, float(episode % 2), episode=episode))
        made.append(Trajectory(f"r{order}", f"p{order}", order, tuple(samples)))
    return made


def _changed(change: Callable[[Sample], Sequence[Sample]]) -> list[Trajectory]:
    return [replace(each, samples=[new for old in each.samples for new in change(old)]) for each in trajectories()]


def of_two_policies() -> list[Trajectory]:
    """Each sample once of the run's own policy and once of `judge`."""
    return _changed(lambda sample: (sample, replace(sample, group="judge", reward=1.0 - sample.reward)))


def routed() -> list[Trajectory]:
    """With the experts that each token went through."""
    rng = np.random.default_rng(1)

    def chosen(sample: Sample) -> Sequence[Sample]:
        drawn = rng.random((len(sample.tokens), LAYERS, EXPERTS)).argsort(-1)[..., :EXPERTS_PER_TOKEN]
        return (replace(sample, routing=drawn.astype(np.uint8)),)

    return _changed(chosen)


# What a step does.

Setting = Any
"""A value, or a function that makes it of `Folders`."""


def rewarded(config: ExperimentConfig, path: str) -> Graph:
    """The graph of a run whose rewards are a model's, and which stays near a reference."""
    scoring = Call("score", "scorer", "reward", ("tokens", "loss_mask"), ("scores",), args={"path": path})
    reads = ("rewards", "scores", "loss_mask", "ref_logprobs")
    advantage = Call("advantage", "actor", "advantage", reads, ("advantages",), args={"rewards": ["scores"]})
    train = Call("actor_train", "actor", "actor_train", (*POLICY_READS, "ref_logprobs"))
    return Graph("rewarded", (*reference(config), scoring, advantage, train))


REWARDED: dict[str, Setting] = {
    "algorithm__graph": "tests.device_cases:rewarded",
    "algorithm__graph_args": lambda folders: {"path": str(folders(REWARD_MODEL))},
    "algorithm__kl_coef": 0.1,
    "algorithm__prox": "behave",
}


class TrainCase(NamedTuple):
    """A step of the model `model` on `data` with `settings`."""

    settings: Mapping[str, Setting] = {}
    model: str = PLAIN
    data: Callable[..., list[Trajectory]] = trajectories


TRAIN_CASES: dict[str, TrainCase] = {
    "tree": TrainCase(),
    "packed": TrainCase({"trainer__share_prefixes": False}),
    "padded": TrainCase(
        {"model__attn_implementation": AttentionImplementation.eager, "trainer__share_prefixes": False}
    ),
    "checkpointing": TrainCase({"trainer__gradient_checkpointing": True}),
    "activations on the host": TrainCase(
        {"trainer__gradient_checkpointing": True, "trainer__activations_on": KeptOn.host}
    ),
    "bf16": TrainCase({"model__dtype": Dtype.bfloat16}),
    "whole distributions": TrainCase({"algorithm__kl_coef": 0.1, "algorithm__kl": ChoiceConfig(name="full")}),
    "critic": TrainCase({"algorithm__graph": "ppo", "algorithm__advantage": ChoiceConfig(name="gae")}),
    "critic of normalised returns": TrainCase(
        {
            "algorithm__graph": "ppo",
            "algorithm__advantage": ChoiceConfig(name="gae_turn"),
            "algorithm__critic__value_norm": ValueNormalisation.running,
        }
    ),
    "adapters": TrainCase({"model__lora__rank": 4, "algorithm__kl_coef": 0.1}),
    "dapo": TrainCase({"algorithm__graph": "dapo", "algorithm__entropy_coef": 0.01}),
    "selected tokens, stop_kl": TrainCase(
        {"algorithm__selection": ChoiceConfig(name="kl_cov"), "algorithm__stop_kl": 9.0}
    ),
    "teacher": TrainCase({"algorithm__teachers": lambda folders: [TeacherConfig(name="own", path=str(folders()))]}),
    "averaged reference, two passes": TrainCase(
        {
            "algorithm__kl_coef": 0.1,
            "algorithm__kl_in": KLIn.reward,
            "algorithm__reference__mode": ReferenceMode.ema,
            "trainer__ppo_epochs": 2,
        }
    ),
    "reward model": TrainCase(REWARDED),
    "scored ahead": TrainCase({**REWARDED, "trainer__score_ahead": True}),
    "two policies": TrainCase({"policies": [PolicyConfig("judge", trained=True)]}, data=of_two_policies),
    "few allowed tokens": TrainCase(
        {"rollout__sampling__allowed_token_ids": "3-63", "rollout__sampling__temperature": 0.8}
    ),
    "moments on the host": TrainCase({"optimizer__moments_on": KeptOn.host}),
    "off-loaded": TrainCase({"trainer__offload": True, "algorithm__kl_coef": 0.1}),
    "experts, replayed": TrainCase({"moe__replay_routing": True}, "Mixtral", routed),
    "sinks and windows": TrainCase(model="GPT-OSS"),
    "capped logits": TrainCase(model="Gemma 2"),
    "linear attention": TrainCase(model="Qwen3.5"),
    "scan": TrainCase(model="Mamba 2"),
    "pictures": TrainCase({"algorithm__entropy_coef": 0.1}, PICTURE_MODEL),
    "pictures, frozen tower": TrainCase(
        {"algorithm__entropy_coef": 0.1, "model__vision": VisionMode.freeze}, PICTURE_MODEL
    ),
}


def configured(case: TrainCase, folders: Folders, *, micro_batch: int) -> ExperimentConfig:
    """The experiment of `case`, with two minibatches a pass."""
    config = ExperimentConfig(train_batch_size=4, group_size=4)
    config.model.path, config.model.dtype = str(folders(case.model)), Dtype.float32
    config.trainer.ppo_minibatches, config.trainer.tokens_per_micro_batch = 2, micro_batch
    for name, value in case.settings.items():
        *path, last = name.split("__")
        group: Any = config
        for part in path:
            group = getattr(group, part)
        setattr(group, last, value(folders) if callable(value) else value)
    return config


def data_of(case: TrainCase, folders: Folders) -> list[Trajectory]:
    """What a step of `case` trains on."""
    return vlm_trajectories(folders(case.model)) if case.model in KINDS else case.data()


def step(
    config: ExperimentConfig,
    rank: TrainingRank,
    version: int,
    device: torch.device,
    made: Sequence[Trajectory] | None = None,
) -> StatValues:
    """A train step on the whole graph; the statistics of all calls, those of further policies by `policy/name`."""
    graph, given = load_graph(config), trajectories() if made is None else made
    calls = ModelCalls(config, graph, rank)
    passes = range(config.trainer.ppo_epochs)
    number = config.trainer.ppo_minibatches
    policies = ("", *config.trained_policies)
    minibatches = [[number * each + order % number for each in passes] * len(policies) for order in range(len(given))]
    if config.trainer.score_ahead:
        given = _scored_ahead(given, calls, [call for call in graph.calls if call.role in ("ref", "scorer")], device)
    plain, ahead = detach(given)
    stats: StatValues = {}
    for part in parts_of_policies(plain, minibatches, config.trained_policies):
        total = number * len(passes)
        batch = build_step_batch(
            part.trajectories, part.minibatches, version=version, num_minibatches=total, device=device
        )
        batch.ahead = {key: torch.from_numpy(own).to(device) for key, own in ahead.items()}
        for call in graph.order():
            if call.policy == part.policy:
                reported = calls.run(RunCall.of(call), batch)
                stats |= {f"{part.policy}/{name}" if part.policy else name: figure for name, figure in reported.items()}
    return stats


def _scored_ahead(
    given: Sequence[Trajectory], calls: ModelCalls, frozen: Sequence[Call], device: torch.device
) -> list[Trajectory]:
    """As `QueuedRequests.score_ahead` has it."""
    batch = build_step_batch(given, [0] * len(given), version=0, num_minibatches=1, device=device)
    for call in frozen:
        calls.run(RunCall.of(call), batch)
    scores = scores_of(batch, [key for call in frozen for key in call.writes])
    return [attach(trajectory, scores[trajectory.rollout_id]) for trajectory in given]


# What an embedded engine does.


def _letters(rows: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in rows)


def _nothing(index: int, output: GenerationOutput) -> None: ...


@dataclass(frozen=True)
class EngineCase:
    """An engine that answers three groups of four samples.

    Attributes:
        waits: of the host, for each token: which rows are finished, and the tokens at the end. Those of samples that
            Python looks at are read as well, and samples that share a slot are compared.
    """

    model: str = PLAIN
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    waits: int = 2


READS_TOO, SHARES_SLOTS = 5, 5
ENGINE_CASES: dict[str, EngineCase] = {
    "plain": EngineCase(),
    "top_p": EngineCase(sampling={"temperature": 0.8, "top_p": 0.9}),
    "top_k, min_p, few allowed tokens": EngineCase(
        sampling={"top_k": 20, "min_p": 0.01, "allowed_token_ids": tuple(range(3, 60))}
    ),
    "min_new_tokens": EngineCase(sampling={"min_new_tokens": 18, "stop_token_ids": tuple(range(0, 60, 3))}),
    "greedy": EngineCase(sampling={"temperature": 0.0}, waits=SHARES_SLOTS),
    "stop strings": EngineCase(engine={"detokenize": _letters}, sampling={"stop": ("zzzz",)}, waits=READS_TOO),
    "streamed": EngineCase(job={"on_progress": _nothing}, waits=READS_TOO),
    "log-probabilities of prompts": EngineCase(asked={"prompt_logprobs_from": 0}),
    "prompts in parts": EngineCase(engine={"chunked_prefill_size": 12}),
    "bf16": EngineCase(dtype=torch.bfloat16),
    "experts, recorded": EngineCase("Mixtral", {"record_routing": True}, asked={"routing_from": 0}),
    "sinks and windows": EngineCase("GPT-OSS"),
    "capped logits": EngineCase("Gemma 2"),
    "latent attention": EngineCase("DeepSeek-V3"),
    "linear attention": EngineCase("Qwen3.5"),
    "scan": EngineCase("Mamba 2"),
    "states in modules": EngineCase("RecurrentGemma"),
    "pictures": EngineCase(PICTURE_MODEL),
    "pictures that look both ways": EngineCase("gemma3"),
}


def engine_of(case: EngineCase, device: torch.device, folders: Folders, **settings: Any) -> GenerationEngine:
    """The engine of `case`; `settings` of its model."""
    limits = {"max_running_requests": 16, "max_model_len": 128, "max_total_tokens": 2048, **case.engine}
    if case.model in KINDS:
        folder = folders(case.model)
        seeing: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(folder).eval()
        torch.nn.Module.to(seeing, device)
        return GenerationEngine(seeing, pictures=Pictures.of(seeing, folder), **limits)
    model = model_of(case.model, **settings).to(case.dtype)  # type: ignore[arg-type]
    torch.nn.Module.to(model, device)
    return GenerationEngine(model, **limits)


def jobs_of(case: EngineCase, folders: Folders, new_tokens: int = 20) -> list[Job]:
    """Three groups of four samples."""
    made = []
    for number in range(3):
        asked = dict(case.asked)
        prompt = tuple(range(5 + number, 25))
        if case.model in KINDS:
            shown = render(folders(case.model), "<u>how ", picture(number), "?<end><a>")
            prompt, asked["pictures"] = tuple(shown.ids), shown.placed
        specs = [SamplingSpec(new_tokens, seed=100 * number + each, **case.sampling) for each in range(4)]
        inputs = [GenerationInput(f"r{number}-{each}", prompt, spec, **asked) for each, spec in enumerate(specs)]
        made.append(Job(tuple(inputs), **case.job))
    return made
