"""Every architecture that people train, with tiny random weights: is it trained and served right, or refused?

The table in `docs/models.md` is made of what this file finds, and each test holds its row against it. The suite tries
`SAMPLE`, which has one of each kind; the variable ASYNCRL_EVERY_CASE has all of them tried.

    ASYNCRL_EVERY_CASE=1 pytest tests/unit/models                  holds every row of the page against the code
    python tests/unit/models/test_every_architecture.py             writes the table anew
    python tests/unit/models/test_every_architecture.py --sglang PYTHON     and starts a real SGLang for each,
                                                                           with the interpreter PYTHON that has it

A column is a check in `CHECKS`: what it returns is the cell. What it cannot look at here (SGLang, which takes half a
minute a model) stays as it was found last.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import logging
import multiprocessing
import random
import tempfile
import traceback
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.comm.name_resolve import make_resolver
from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device, Dtype
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import GenerationInput, SamplingSpec
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.models.ranks import PeerFailed
from asyncrl.models.transformers_internals import set_attention
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.engines.base import PolicyEngine, PolicyOutputs
from asyncrl.trainer.engines.flat import FlatLoader, FlatPolicyEngine
from asyncrl.trainer.engines.sharded import loader
from asyncrl.trainer.engines.sharded.build import whole
from asyncrl.trainer.engines.sharded.loader import ShardedLoader
from asyncrl.trainer.engines.sharded.tensor_parallel import LayoutError
from asyncrl.trainer.model.layout_parity import SequenceLayout
from asyncrl.trainer.parallel.checks import PIPELINE_PARALLEL, TENSOR_PARALLEL
from asyncrl.trainer.parallel.placement import Layout, Placement, WorkerGrid
from asyncrl.trainer.parallel.process_groups import training_world
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import AttentionImplementation, OptimizerConfig

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
VOCABULARY = 64
TOLERANCE = 2e-5
"""Nats, fp32; leaks and left-out parts are above 0.1 at weights of this spread."""

Check = Callable[["Candidate"], str]

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.25,
}
MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE": ("qwen3_moe", EXPERTS),
    "Qwen3-Next": ("qwen3_next", {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16}),
    "Qwen3.5": ("qwen3_5_text", DELTA),
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {"sliding_window": 6}),
    "Mixtral": ("mixtral", {"num_local_experts": 4}),
    "Phi3": ("phi3", {}),
    "Gemma 2": ("gemma2", {**MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "Gemma 3": ("gemma3_text", MIXED),
    "RecurrentGemma": (
        "recurrent_gemma",
        {
            "block_types": ["recurrent", "attention"],
            "lru_width": 32,
            "attention_window_size": 6,
            "num_key_value_heads": 1,
        },
    ),
    "GLM4": ("glm4", {}),
    "Granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
        },
    ),
    "GraniteMoeHybrid": (
        "granitemoehybrid",
        {
            **MAMBA2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
            "logits_scaling": 3.0,
        },
    ),
    "Cohere": ("cohere", {"logit_scale": 0.25}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", MIXED),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "GPT-OSS": ("gpt_oss", {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V2": ("deepseek_v2", LATENT),
    "DeepSeek-V3": ("deepseek_v3", LATENT),
    "StableLM": ("stablelm", {"partial_rotary_factor": 0.5}),
    "Nemotron": ("nemotron", {}),
    "Falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None}),
    "Falcon (alibi)": ("falcon", {"new_decoder_architecture": False, "alibi": True, "head_dim": None}),
    "FalconH1": ("falcon_h1", {**MAMBA2, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    "Bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "MPT": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "expansion_ratio": 2}),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "Bamba": ("bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    "Mamba": ("mamba", {"state_size": 8, "time_step_rank": 4}),
    "Mamba 2": ("mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16}),
    "GPT-2": ("gpt2", {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "Phi": ("phi", {}),
}
SAMPLE = {
    "Qwen3-MoE": "experts, norms of queries and keys",
    "Qwen3-Next": "gated delta rule beside attention, shared experts; no slices",
    "Phi3": "queries, keys and values in one matrix",
    "Gemma 2": "capped logits, norms behind the layers",
    "GPT-OSS": "window in some layers, sinks, biased experts",
    "RecurrentGemma": "gated linear recurrence",
    "SmolLM3": "layers without positions",
    "DeepSeek-V3": "latent attention, groups of experts",
    "Falcon (alibi)": "packed without shared prefixes; positions as a bias, which the embedded engine refuses",
    "FalconH1": "Mamba 2 and attention in one layer",
    "LFM2": "short convolutions",
    "Mamba": "no attention at all",
    "GPT-2": "learned positions, Conv1D",
    "Phi": "attention and MLP side by side; slices without stages",
}
"""The architectures that the suite tries, and what each has that those before it lack."""


@dataclass
class Candidate:
    """One architecture: a folder with its model, and the same model in plain transformers to compare with."""

    folder: Path
    plain: PreTrainedModel
    ranks: TwoRanks
    reasons: list[str] = field(default_factory=list)
    """Why an engine refused it, as checks found it."""

    @classmethod
    def of(cls, name: str, folder: Path, ranks: TwoRanks) -> Candidate:
        """Save the architecture `name` with random weights in `folder`."""
        model_type, settings = ARCHITECTURES[name]
        config = CONFIG_MAPPING[model_type](
            **{key: value for key, value in {**COMMON, **settings}.items() if value is not None}
        )
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype="float32").eval()
        set_attention(model, "eager")
        return cls(folder, model, ranks)

    @cached_property
    def alone(self) -> tuple[FlatPolicyEngine, dict[str, NDArray[np.float32]]]:
        """The flat engine, and the gradients of the whole batch: what ranks find is compared with."""
        engine = trainer(self, AttentionImplementation.sdpa)
        gradients_of(engine, ragged_batch())
        return engine, {n: p.grad.numpy().copy() for n, p in engine.network.named_parameters() if p.grad is not None}

    def logprobs(self, tokens: list[int], prompt: int) -> Tensor:
        """log p of `tokens[prompt:]`, the sequence alone; differentiable."""
        ids = torch.tensor([tokens])
        logprobs: Tensor = self.plain(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        return logprobs[:-1].gather(-1, ids[0, 1:, None])[prompt - 1 :, 0]


def ragged_batch(samples: slice = slice(None)) -> StepBatch:
    """Twelve samples of 5 to 24 tokens, or some of them; of each three all begin alike, beyond their prompts."""
    rng = np.random.default_rng(0)
    made: list[Sample] = []
    for number in range(12):
        length, prompt = int(rng.integers(5, 25)), int(rng.integers(2, 5))
        tokens = rng.integers(3, VOCABULARY, length).astype(np.int32)
        if number % 3:
            begin = made[number // 3 * 3].tokens[: length - number % 3]
            tokens[: len(begin)] = begin
        mask = (np.arange(length) >= prompt).astype(np.uint8)
        made.append(
            Sample(
                tokens=tokens,
                loss_mask=mask,
                behave_logprobs=np.zeros(length, np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                reward=0.0,
                truncated=False,
            )
        )
    return build_step_batch([Trajectory("r", "p", 0, tuple(made[samples]))], [0], version=0, num_minibatches=1)


def trainer(
    candidate: Candidate, attention: AttentionImplementation, *, share_prefixes: bool = True
) -> FlatPolicyEngine:
    """The training engine as a run loads it."""
    config = configured("d1")
    config.model.attn_implementation = attention
    config.trainer.share_prefixes = share_prefixes
    flat = FlatLoader(config, RankPosition(), torch.device("cpu"))
    return flat.policy(str(candidate.folder), Dtype.float32, OptimizerConfig())


def configured(parallel: str) -> ExperimentConfig:
    config = ExperimentConfig()
    config.trainer.parallel = parallel
    config.trainer.tokens_per_micro_batch = 96
    config.rollout.sampling.temperature = 1.0
    config.generation.context_length = 96
    return config


def gradients_of(engine: PolicyEngine, batch: StepBatch) -> None:
    """Accumulate the gradients of a sum of log-probabilities, each with a weight of its own."""
    weights_T = batch["tokens"] / VOCABULARY - 0.5

    def share(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Any]]:
        return (outputs.logprobs_N * weights_T[micro_batch.targets_N]).sum(), {}

    engine.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), share)


def assert_trains_right(candidate: Candidate, engine: FlatPolicyEngine) -> None:
    """Log-probabilities and gradients of a ragged batch are those of transformers, sequence by sequence."""
    batch = ragged_batch()
    weights_T = batch["tokens"] / VOCABULARY - 0.5
    got = engine.logprobs(batch, batch["loss_mask"])
    engine.network.zero_grad()
    gradients_of(engine, batch)
    candidate.plain.zero_grad()
    for start, length in zip(batch.starts_S, batch.lengths_S, strict=True):
        piece = slice(int(start), int(start + length))
        prompt = int(length - batch["loss_mask"][piece].sum())
        expected = candidate.logprobs(batch["tokens"][piece].tolist(), prompt)
        torch.testing.assert_close(got[piece][prompt:], expected.detach(), rtol=0, atol=TOLERANCE)
        torch.autograd.backward((expected * weights_T[piece][prompt:]).sum())
    gradients = {name: parameter.grad for name, parameter in engine.network.named_parameters()}
    size = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
    for name, parameter in candidate.plain.named_parameters():
        mine, its = gradients[name], parameter.grad
        assert mine is not None, name
        difference = mine if its is None else mine - its
        assert float(difference.abs().max()) < 1e-4 * size, name


def shares_prefixes(candidate: Candidate) -> str:
    """Under the default settings; the stream has fewer tokens than the samples."""
    engine, _ = candidate.alone
    if engine.attention != AttentionKind.tree:
        return "no"
    batch = ragged_batch()
    made = list(engine.micro_batches(batch, batch["loss_mask"]))
    stream = sum(micro_batch.model_inputs["input_ids"].numel() for micro_batch in made)
    assert stream < 0.9 * sum(len(micro_batch.sources_I) for micro_batch in made)
    assert_trains_right(candidate, engine)
    return "yes"


def trains_packed(candidate: Candidate) -> str:
    """Under the default `model.attn_implementation=sdpa`, each sample apart."""
    engine = trainer(candidate, AttentionImplementation.sdpa, share_prefixes=False)
    if engine.attention != AttentionKind.packed:
        return "no"
    assert_trains_right(candidate, engine)
    return "yes"


def trains_padded(candidate: Candidate) -> str:
    """As chosen where packing is not right; else by `model.attn_implementation=eager`."""
    engine, _ = candidate.alone
    if engine.attention != AttentionKind.padded:  # eager attention
        engine = trainer(candidate, AttentionImplementation.eager)
    assert engine.attention == AttentionKind.padded
    assert_trains_right(candidate, engine)
    return "yes"


def served_embedded(candidate: Candidate) -> str:
    """Samples that join and leave a batch of three have the log-probabilities of a plain forward."""
    model = AutoModelForCausalLM.from_pretrained(str(candidate.folder), dtype="float32")
    try:
        engine = GenerationEngine(model, max_running_requests=3, max_model_len=64)
    except UnsupportedModelError as error:
        reason = str(error).partition(" engine: ")[2].partition(". Use ")[0]
        candidate.reasons.append(f"the embedded engine: {reason}")
        return "refused"
    engine.eos_token_ids = ()
    draw = random.Random(1)
    inputs = [
        GenerationInput(
            f"r{index}",
            tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 24))),
            SamplingSpec(max_new_tokens=draw.randint(1, 20), seed=index),
        )
        for index in range(7)
    ]
    future = engine.submit(Job(tuple(inputs)))
    while engine.step():
        pass
    with torch.no_grad():
        for request, output in zip(inputs, future.result(timeout=0), strict=True):
            tokens = [*request.input_ids, *output.output_ids]
            expected = candidate.logprobs(tokens, len(request.input_ids))
            torch.testing.assert_close(torch.tensor(output.logprobs), expected, rtol=0, atol=TOLERANCE)
    return "yes"


# Spread over ranks.


Found = tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]
"""Log-probabilities of a rank's samples, gradients of its parameters."""
Findings = Callable[[str, str, int, Path], Found]
WAIT_S = 300.0


class TwoRanks:
    """Two processes that train one model after the other, each in a world of its own.

    Args:
        findings: called in each with the model's folder, the layout, the rank and a folder for the world.
    """

    def __init__(self, scratch: Path, findings: Findings | None = None) -> None:
        self._findings = findings or spread
        context = multiprocessing.get_context("fork")  # which has torch loaded already
        self._jobs: list[Any] = [context.SimpleQueue() for _ in range(2)]
        self._told: Any = context.Queue()
        self._ranks = [context.Process(target=self._be_rank, args=(rank, scratch), daemon=True) for rank in range(2)]
        for rank in self._ranks:
            rank.start()

    def train(self, folder: Path, parallel: str) -> list[Found]:
        """Return the findings of each rank about its part of the model in `folder`.

        Raises:
            LayoutError, UnsupportedModelError: it was refused.
            RuntimeError: it failed otherwise; `PeerFailed` only where no rank told a cause.
        """
        for jobs in self._jobs:
            jobs.put((str(folder), parallel))
        found = dict(self._told.get(timeout=WAIT_S) for _ in self._ranks)
        failures = [reported for reported in found.values() if isinstance(reported, Exception)]
        for reported in sorted(
            failures, key=lambda reported: isinstance(reported, PeerFailed)
        ):  # the cause before its echo
            raise reported
        return [found[rank] for rank in range(2)]

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.join()

    def _be_rank(self, rank: int, scratch: Path) -> None:
        torch.set_num_threads(1)
        loader.select_layout = proven_once(loader.select_layout)
        number = 0
        while True:
            folder, parallel = self._jobs[rank].get()
            number += 1
            place = scratch / f"world{number}"
            place.mkdir(parents=True, exist_ok=True)
            try:
                self._told.put((rank, self._findings(folder, parallel, rank, place)))
            except (LayoutError, PeerFailed, UnsupportedModelError) as error:
                self._told.put((rank, error))
            except Exception:
                self._told.put((rank, RuntimeError(traceback.format_exc())))
            gc.collect()  # the engine, a cycle, holds its groups, whose threads wake 100 times a second


def proven_once(select_layout: Callable[..., SequenceLayout]) -> Callable[..., SequenceLayout]:
    """The proof is of the model in one process, so it is the same in every layout of ranks that have whole tokens."""
    settled: dict[str, SequenceLayout] = {}

    def once(path: str, config: ExperimentConfig, dtype: torch.dtype, *rest: Any) -> SequenceLayout:
        if "c" in config.trainer.parallel:
            return select_layout(path, config, dtype, *rest)
        if path not in settled:
            settled[path] = select_layout(path, config, dtype, *rest)
        return settled[path]

    return once


def spread(folder: str, parallel: str, rank: int, scratch: Path) -> Found:
    config = configured(parallel)
    config.trainer.collective_timeout_s = WAIT_S / 2
    placed = Placement({ACTOR: WorkerGrid.of(Layout.parse(parallel))})
    names = make_resolver("file", str(scratch / "names"))
    with training_world(config, rank, placed, torch.device("cpu"), scratch, names) as world:
        place = world.position(ACTOR)
        engine = ShardedLoader(config, place, torch.device("cpu")).policy(folder, Dtype.float32, OptimizerConfig())
        batch = ragged_batch(slice(place.data.rank, None, place.data.world))
        logprobs_T = engine.logprobs(batch, batch["loss_mask"])
        gradients_of(engine, batch)
        gradients = {name: whole(cast(Tensor, each.grad)).numpy() for name, each in engine.parameters().items()}
        return logprobs_T.numpy(), gradients


def trains_as(parallel: str) -> Check:
    """Two ranks in the layout `parallel` find what the flat engine finds alone."""

    def check(candidate: Candidate) -> str:
        try:
            found = candidate.ranks.train(candidate.folder, parallel)
        except (LayoutError, UnsupportedModelError):
            return "refused"
        alone, expected = candidate.alone
        largest = max(float(np.abs(gradient).max()) for gradient in expected.values())
        assert set().union(*(gradients for _, gradients in found)) == expected.keys()
        for rank, (logprobs_T, gradients) in enumerate(found):
            samples = slice(rank, None, 2) if parallel == "d2" else slice(None)
            batch = ragged_batch(samples)
            logprobs = alone.logprobs(batch, batch["loss_mask"])
            np.testing.assert_allclose(logprobs_T, logprobs, rtol=0, atol=TOLERANCE)
            for name, gradient in gradients.items():
                np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-4 * largest, err_msg=name)
        return "yes"

    return check


CHECKS: dict[str, Check] = {
    "shared prefixes": shares_prefixes,
    "trained packed": trains_packed,
    "trained on padded rows": trains_padded,
    "d2": trains_as("d2"),
    "t2": trains_as("t2"),
    "p2": trains_as("p2"),
    "c2": trains_as("c2"),
    "served by the embedded engine": served_embedded,
}
"""By column. A new one is one more entry."""
SGLANG = "served by SGLang"
NOT_TRIED = "not tried"
COLUMNS = (*CHECKS, SGLANG)


def served_by_sglang(candidate: Candidate, python: str, scratch: Path) -> str:
    """A real server on the CPU scores several prompts at once as a plain forward does."""
    from asyncrl.inference.client import connect
    from asyncrl.inference.process import EngineStartError
    from asyncrl.inference.sglang.host import SGLangHost

    config = ExperimentConfig()
    config.model.path = str(candidate.folder)
    config.generation.sglang.python = python
    config.generation.context_length = 96
    config.generation.start_timeout_s = 300.0
    draw = random.Random(2)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in (20, 13, 7)]

    async def scores() -> list[list[float]]:
        host = SGLangHost(
            config,
            scratch="sglang0",
            run_dir=scratch,
            device=Device.cpu,
            token="t" * 32,
            log=logging.getLogger("sglang"),
        )
        try:
            served = await host.start()
            async with connect(served.url, "t" * 32) as client:
                return await asyncio.gather(*(client.prompt_logprobs(each, 0, timeout_s=60.0) for each in prompts))
        finally:
            await host.stop()

    try:
        got = asyncio.run(scores())
    except EngineStartError as error:
        print(f"  SGLang: {error}")
        return NOT_TRIED if "within" in str(error).splitlines()[0] else "does not start on a CPU"
    with torch.no_grad():
        expected = [candidate.logprobs(each, 1) for each in prompts]
    worst = max(float((torch.tensor(a) - b).abs().max()) for a, b in zip(got, expected, strict=True))
    print(f"  SGLang differs by {worst:.1e}")
    return "yes" if worst < 1e-3 else f"differs by {worst:.1g} nats"


# The page.

BEGIN, END = "<!-- {}: made by tests/unit/models/test_every_architecture.py -->", "<!-- end of {} -->"


def section(page: str, name: str) -> list[str]:
    """Lines between the marks of the part `name`."""
    begin, end = BEGIN.format(name), END.format(name)
    assert begin in page, f"{PAGE} has lost the mark {begin!r}"
    assert end in page, f"{PAGE} has lost the mark {end!r}"
    return page.partition(begin)[2].partition(end)[0].strip().splitlines()


def replace_section(page: str, name: str, lines: list[str]) -> str:
    begin, end = BEGIN.format(name), END.format(name)
    before, _, rest = page.partition(begin)
    return "\n".join([before + begin, "", *lines, "", end + rest.partition(end)[2]])


def row(name: str, cells: dict[str, str]) -> str:
    return f"| {name} | {' | '.join(cells[column] for column in COLUMNS)} |"


HEADER = [f"| architecture | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]


def cells_of(line: str) -> tuple[str, dict[str, str]]:
    """A row's name and its cells by column."""
    name, *cells = [cell.strip() for cell in line.strip("| ").split("|")]
    return name, dict(zip(COLUMNS, cells, strict=False))


def reasons_of(name: str, candidate: Candidate) -> list[str]:
    return [f"- {name}, {reason}." for reason in candidate.reasons]


def examine(name: str, folder: Path, ranks: TwoRanks) -> tuple[Candidate, dict[str, str]]:
    """Run every check on an architecture."""
    candidate = Candidate.of(name, folder, ranks)
    return candidate, {column: check(candidate) for column, check in CHECKS.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    with closing(TwoRanks(tmp_path_factory.mktemp("ranks"))) as two:
        yield two


def sampled(names: Iterable[str], sample: Container[str]) -> list[Any]:
    """Parameters of a test; those beyond the sample are tried where they are asked for."""
    return [pytest.param(name, marks=[] if name in sample else [pytest.mark.every_case]) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(ARCHITECTURES, SAMPLE))
def test_it_is_trained_and_served_right_or_refused_as_the_page_says(name: str, tmp_path: Path, ranks: TwoRanks) -> None:
    candidate, cells = examine(name, tmp_path / "model", ranks)
    page = PAGE.read_text(encoding="utf-8")
    rows = dict(cells_of(line) for line in section(page, "table")[2:])
    fix = f"; write it anew: python {Path(__file__).relative_to(PAGE.parents[1])}"
    found = {**cells, SGLANG: rows.get(name, {}).get(SGLANG, NOT_TRIED)}
    assert row(name, found) in section(page, "table"), f"{PAGE.name} is out of date{fix}"
    reported = [line for line in section(page, "reasons") if line.startswith(f"- {name}, ")]
    assert reasons_of(name, candidate) == reported, f"{PAGE.name} is out of date{fix}"


def test_the_page_has_these_architectures_and_no_others() -> None:
    table = section(PAGE.read_text(encoding="utf-8"), "table")
    assert table[:2] == HEADER
    assert [cells_of(line)[0] for line in table[2:]] == list(ARCHITECTURES)


@pytest.mark.parametrize(("column", "allowed"), [("t2", TENSOR_PARALLEL), ("p2", PIPELINE_PARALLEL)])
def test_what_is_cut_is_what_the_page_shows_to_be_right(column: str, allowed: frozenset[str]) -> None:
    rows = dict(cells_of(line) for line in section(PAGE.read_text(encoding="utf-8"), "table")[2:])
    assert {ARCHITECTURES[name][0] for name, cells in rows.items() if cells[column] == "yes"} == allowed


def main() -> None:
    """Rewrite the page's table and reasons."""
    parser = argparse.ArgumentParser(description="Write the table in docs/models.md anew.")
    parser.add_argument("--sglang", metavar="PYTHON", help="interpreter with SGLang, to start a server for each model")
    parser.add_argument("--only", nargs="*", default=list(ARCHITECTURES), help="try SGLang on these alone")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    old = section(page, "table")
    columns = [cell.strip() for cell in old[0].strip("| ").split("|")]
    before = {}
    for line in old[2:]:  # columns may have come since
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        before[cells[0]] = dict(zip(columns, cells, strict=True))
    lines, reasons = copy.copy(HEADER), []
    for name in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder, closing(TwoRanks(Path(folder) / "ranks")) as ranks:
            candidate, cells = examine(name, Path(folder) / "model", ranks)
            cells[SGLANG] = before.get(name, {}).get(SGLANG, NOT_TRIED)
            if options.sglang and name in options.only:
                cells[SGLANG] = served_by_sglang(candidate, options.sglang, Path(folder) / "run")
        print(row(name, cells), flush=True)
        lines.append(row(name, cells))
        reasons += reasons_of(name, candidate)
    page = replace_section(replace_section(page, "table", lines), "reasons", reasons)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
