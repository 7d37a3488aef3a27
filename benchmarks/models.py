"""Every causal language model of transformers, tiny and random: is it trained and served as transformers computes it?

    python benchmarks/models.py --out FOUND.jsonl [--part 1/4] [--only llama mistral] [--length 24]
    python benchmarks/models.py --write FOUND.jsonl ...       writes docs/tables/models.md from what was found

Each entry of transformers' mapping of causal language models is made with 4 layers, random weights and dropout in its
config, with `--length` in place of every window, chunk and number of indexed keys, and saved. Then, in fp32 on one
core:

- *trained*: the training engine loads the folder as a run without pictures does and computes 24 samples of up to 90
  tokens, which branch in the middle of prompts and answers. Their log-probabilities and the gradients of all weights
  are compared with transformers' forward and backward of each sample alone (eager attention).
- *served*: the embedded engine scores prompts of up to 70 tokens and answers 11 requests, four at a time. Its
  log-probabilities are compared with transformers' forward of each sequence alone. If they differ by more than
  rounding, transformers' own decode (its cache, a token at a time) is compared with its forward as well: recurrent
  models whose scan and step round differently are allowed twice that difference.

A model that is refused has a reason; one that is accepted and differs is a defect. Each model has a process of its own
with limits of time and memory. The whole takes some ten minutes of two cores.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import transformers
from common import parser, with_block
from tiny_models import answered, batch_of, sample_of
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncrl.api.trajectory import Sample
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.engine_io import GenerationInput, SamplingSpec
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.models.transformers_internals import set_attention
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.flat import FlatLoader
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import OptimizerConfig, VisionMode
from asyncrl.weights.folder_tensors import FolderFormatError

PAGE = Path(__file__).parents[1] / "docs" / "tables" / "models.md"
BEGIN, END = "<!-- every model: made by benchmarks/models.py -->", "<!-- end of every model -->"
NAMES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY, CONTEXT, LONGEST, LAYERS = 64, 128, 90, 4
LOGPROB_TOLERANCE, GRADIENT_TOLERANCE = 2e-4, 1e-3
"""Nats, and parts of the largest gradient; what is wrong differs by 0.05 to 6 at weights of this spread."""
DECODE_FACTOR = 2
"""A served model may differ from transformers' forward by this many times what transformers' own decode does."""
MOST_PARAMETERS, MEMORY_BYTES, LIMIT_S = 30_000_000, 12 << 30, 180

Found = dict[str, Any]


class Row(NamedTuple):
    """A model on the page: `trained` is its layout or what became of it, `served` is `yes` or what became of it."""

    name: str
    trained: str
    served: str
    why: str


ALWAYS: Found = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.25,
}
SIZES: dict[int | float, str] = {
    2: "num_experts_per_tok moe_topk moe_k top_k_experts linear_num_key_heads n_mamba_heads index_n_heads num_kv_heads "
    "num_kv_shared_layers swa_num_key_value_heads expansion_ratio max_window_layers sliding_window_pattern "
    "zero_expert_num",
    3: "index_topk_blocks",
    4: "n_layer n_layers num_layers n_head n_heads num_heads decoder_layers decoder_attention_heads num_experts "
    "encoder_attention_heads num_local_experts n_routed_experts moe_num_experts linear_num_value_heads "
    "time_step_rank rotary_dim conv_kernel swa_num_attention_heads",
    1: "encoder_layers n_group topk_group first_k_dense_replace n_shared_experts num_shared_experts mamba_n_groups "
    "num_global_key_value_heads moe_layer_freq",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim mamba_n_heads "
    "mamba_d_head mamba_d_state mamba_num_heads mamba_head_dim ssm_state_size state_size laurel_rank dim_head "
    "hidden_size_per_layer_input index_block_size swa_head_dim block_multiple_of kv_channels block_size",
    12: "v_head_dim swa_v_head_dim",
    16: "moe_intermediate_size kv_lora_rank q_lora_rank shared_expert_intermediate_size shared_intermediate_size "
    "mamba_chunk_size index_head_dim global_head_dim moe_intermediate_dim expert_ffn_hidden_size",
    32: "n_embd d_model emb_dim embedding_size word_embed_proj_dim lru_width dim_model",
    48: "n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff dense_intermediate_size",
    64: "mamba_d_ssm vocab_size_per_layer_input",
    CONTEXT: "n_positions n_ctx max_seq_len",
    0.1: "attention_dropout hidden_dropout_prob resid_pdrop attention_probs_dropout_prob dropout",
}
LENGTHS = (
    "sliding_window sliding_window_size attention_window_size window_size attention_chunk_size keep_window_size",
    "index_topk",
)
FLAGS = ("use_sliding_window", "is_decoder")
BY_HAND: dict[str, Found] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "falcon": {"new_decoder_architecture": True},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "recurrent_gemma": {"num_key_value_heads": 1},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bamba": {"attn_layer_indices": [1, 3]},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 16},
    "xlm": {"causal": True},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}
VARIANTS: tuple[Found, ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": None},
    {"head_dim": 8, "num_key_value_heads": 1},
    {"num_kv_shared_layers": 0},
    {"attention_dropout": 0.0},
)
"""Tried in this order, until one makes a model that computes."""
SPARE = ("head_dim", "sliding_window_pattern", "layer_types", "block_size", "num_kv_shared_layers")
"""Fields that are left out where a config refuses without naming one."""


def settings(length: int) -> Found:
    """Values of a tiny model, by every name that a config may have for them."""
    sized = {name: value for value, names in SIZES.items() for name in names.split()}
    lengths = dict.fromkeys(" ".join(LENGTHS).split(), length)
    return {**ALWAYS, **sized, **lengths, **dict.fromkeys(FLAGS, True), "local_attention": 2 * length}


def tiny_config(model_type: str, length: int, variant: Found) -> PretrainedConfig:
    """A config of `model_type` with what of `settings` it knows.

    Raises:
        Exception: as its class refuses it.
    """
    kind: Any = CONFIG_MAPPING[model_type]
    default = kind()
    known = set(vars(default)).union(kind.attribute_map, *(vars(k).get("__annotations__", ()) for k in kind.__mro__))
    if "text_config" in known and default.get_text_config() is not default:
        text = tiny_config(default.get_text_config().model_type, length, variant)
        config: PretrainedConfig = kind(pad_token_id=0, text_config=text.to_dict())
        return config
    values = {name: value for name, value in settings(length).items() if name in known or name in ALWAYS}
    values = {name: value for name, value in values.items() if kind.attribute_map.get(name) not in values}
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(vars(default).get(name) or ()))
        if kinds == ["full_attention"] and "sliding_window" in known:
            kinds = ["sliding_attention", "full_attention"]
        if kinds:
            values[name] = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
    values |= BY_HAND.get(model_type, {}) | variant
    while True:
        try:
            config = kind(**values)
        except Exception as error:
            named = [name for name in values if re.search(rf"\b{name}\b", str(error)) and name not in ALWAYS]
            left = named or [name for name in SPARE if name in values]
            if not left:
                raise
            del values[left[0]]
        else:
            return config


def save_tiny(model_type: str, length: int, folder: str) -> PreTrainedModel:
    """Save a model in `folder`; returns it as transformers loads it, with eager attention.

    Raises:
        Exception: none of `VARIANTS` makes a model.
    """
    first: Exception | None = None
    for variant in VARIANTS:
        try:
            config = tiny_config(model_type, length, variant)
            with torch.device("meta"):
                shapes: PreTrainedModel = AutoModelForCausalLM.from_config(config)
            if (size := sum(parameter.numel() for parameter in shapes.parameters())) > MOST_PARAMETERS:
                raise MemoryError(f"{size / 1e6:.0f} M parameters")
            torch.manual_seed(3)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
            _spread(model)
            with torch.no_grad():
                model(input_ids=torch.arange(3, 40)[None], use_cache=False)
            model.generation_config.eos_token_id = None
            model.save_pretrained(folder)
            plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        except Exception as error:
            first = first or error
        else:
            set_attention(plain, "eager")
            return plain
    assert first is not None
    raise first


@torch.no_grad()
def _spread(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "A_log" not in name and "conv" not in name:
            parameter.normal_(0, 0.15)
        elif parameter.dim() == 1 and parameter.is_floating_point():
            parameter.add_(0.1 * torch.randn_like(parameter))


def plain_logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """log p of `tokens[1:]` by transformers alone; differentiable."""
    ids = torch.tensor([list(tokens)])
    logprobs: Tensor = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0]


def branching_batch() -> StepBatch:
    """Samples of up to `LONGEST` tokens that branch in the middle of prompts, of answers and of each other."""
    draw = np.random.default_rng(0)
    made: list[Sample] = []
    for _ in range(3):
        prompt = draw.integers(3, VOCABULARY, int(draw.integers(4, 30))).tolist()
        answer = draw.integers(3, VOCABULARY, LONGEST - len(prompt)).tolist()
        for cut in (0, 1, len(answer) // 3, len(answer) // 2, len(answer) - 3):
            other = draw.integers(3, VOCABULARY, int(draw.integers(1, max(2, len(answer) - cut)))).tolist()
            made.append(sample_of(prompt + answer[:cut] + other, len(prompt)))
        for end in (len(answer) // 2, len(answer), len(answer)):
            made.append(sample_of(prompt + answer[:end], len(prompt)))
    return batch_of([made])


def trained(folder: str, plain: PreTrainedModel, *, share_prefixes: bool = True) -> Found:
    """Return the layout that the training engine chooses for the model, and the size of its differences."""
    config = ExperimentConfig()
    config.trainer.parallel, config.trainer.tokens_per_micro_batch = "d1", 400
    config.trainer.share_prefixes, config.model.vision = share_prefixes, VisionMode.none
    config.rollout.sampling.temperature, config.generation.context_length = 1.0, CONTEXT
    engine = FlatLoader(config, RankPosition(), torch.device("cpu")).policy(folder, Dtype.float32, OptimizerConfig())
    batch = branching_batch()
    weights_T = batch["tokens"] / VOCABULARY - 0.5
    got = engine.logprobs(batch, batch["loss_mask"])
    engine.compute_gradients(
        batch,
        batch["loss_mask"],
        range(batch.num_seqs),
        lambda micro, outputs: ((outputs.logprobs_N * weights_T[micro.targets_N]).sum(), {}),
    )
    plain.zero_grad()
    worst = 0.0
    for start, size in zip(batch.starts_S, batch.lengths_S, strict=True):
        piece = slice(int(start), int(start + size))
        prompt = int(size - batch["loss_mask"][piece].sum())
        expected = plain_logprobs(plain, batch["tokens"][piece].tolist())[prompt - 1 :]
        worst = max(worst, float((got[piece][prompt:] - expected.detach()).abs().max()))
        torch.autograd.backward((expected * weights_T[piece][prompt:]).sum())
    mine = {name: each.grad for name, each in engine.network.named_parameters() if each.grad is not None}
    its = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in its.values())
    off = max(float((mine.get(name, 0.0) - gradient).abs().max()) for name, gradient in its.items())
    return {"layout": str(engine.attention), "logprobs": worst, "gradients": off / largest}


def served(folder: str, plain: PreTrainedModel) -> Found:
    """By how much the embedded engine differs on prompts and answers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    engine = GenerationEngine(model, max_running_requests=4, max_model_len=100)
    engine.eos_token_ids = ()
    draw = random.Random(1)
    common = tuple(draw.randrange(3, VOCABULARY) for _ in range(40))
    requests = []
    for number in range(11):
        own = tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 30)))
        sampling = SamplingSpec(max_new_tokens=draw.randint(1, 28), seed=number, temperature=float(number != 3))
        prompt = common if number == 5 else common[: draw.choice((0, 20, 40))] + own
        requests.append(GenerationInput(f"r{number}", prompt, sampling, prompt_logprobs_from=0))
    answers = list(zip(requests, answered(engine, requests), strict=True))
    worst = decoded = 0.0
    with torch.no_grad():
        for request, output in answers:
            expected = plain_logprobs(plain, [*request.input_ids, *output.output_ids])
            got = torch.tensor([*(output.prompt_logprobs or [None])[1:], *output.logprobs])
            worst = max(worst, float((got - expected).abs().max()))
        if worst > LOGPROB_TOLERANCE:
            decoded = max(decode_difference(plain, request.input_ids, output.output_ids) for request, output in answers)
    return {"logprobs": worst, "decode": decoded}


def decode_difference(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Largest difference, in nats, of transformers' decode with its cache from its forward, over `answer`."""
    expected = plain_logprobs(model, [*prompt, *answer])[len(prompt) - 1 :]
    inputs, cache, worst = torch.tensor([list(prompt)]), None, 0.0
    for token, logprob in zip(answer, expected, strict=True):
        output = model(input_ids=inputs, cache=cache, use_cache=True)
        got = output.logits[0, -1].float().log_softmax(-1)[token]
        worst = max(worst, float((got - logprob).abs()))
        cache, inputs = output.cache, torch.tensor([[token]])
    return worst


def outcome(attempt: Callable[[], Found]) -> Found:
    """Return the findings of the attempt, or the reason for its failure."""
    try:
        return attempt()
    except (UnsupportedModelError, FolderFormatError) as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"fails": f"{type(error).__name__}: {error!s:.200}"}


def examine(model_type: str, length: int) -> Found:
    """Make, train and serve a model; what was found, by column."""
    found: Found = {"name": model_type, "length": length}
    with tempfile.TemporaryDirectory() as folder:
        try:
            plain = save_tiny(model_type, length, folder)
        except Exception as error:
            return found | {"not_made": f"{type(error).__name__}: {error!s:.200}"}
        found["train"] = outcome(lambda: trained(folder, plain))
        if found["train"].get("layout") == "tree":
            found["packed"] = outcome(lambda: trained(folder, plain, share_prefixes=False))
        found["serve"] = outcome(lambda: served(folder, plain))
    return found


def examine_apart(model_type: str, length: int) -> Found:
    """`examine` in a process of its own: some models take all memory, or do not end."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.alarm(LIMIT_S)
        found = examine(model_type, length)
        with os.fdopen(write, "w") as file:
            file.write(json.dumps(found))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    ended = {"name": model_type, "length": length, "not_made": f"its process ended with status {status}"}
    return json.loads(text) if text else ended


# The page.

LAYOUTS = {"tree": "packed, shared prefixes", "packed": "packed", "flash": "packed", "padded": "padded rows"}
HEADER = ["| trained | served by the embedded engine | why not | model types |", "|---|---|---|---|"]


def cell(found: Found, right: str) -> str:
    """`right`, or what became of it instead."""
    for kind in ("refused", "fails"):
        if kind in found:
            return kind
    if not found["logprobs"] < max(LOGPROB_TOLERANCE, DECODE_FACTOR * found.get("decode", 0.0)):
        return f"**differs by {found['logprobs']:.1g} nats**"
    if not found.get("gradients", 0.0) < GRADIENT_TOLERANCE:
        return f"**gradients differ by {found['gradients']:.1g}**"
    return right


def reason(found: Found) -> str:
    """Return the first sentence of a refusal or a failure, without the part that is common to its kind."""
    text = str(found.get("refused") or found.get("fails") or "")
    text = re.sub(r"^.*?(embedded engine: |on padded rows \(sdpa\): )", "", text, flags=re.DOTALL)
    text = re.sub(r"\d+ sequences computed together differ.*", "it differs from transformers' own forward", text)
    return re.split(r"; on padded|\. Use |\.?; packed", text)[0].replace("|", "/").replace("\n", " ")[:150].strip()


def row(found: Found) -> Row:
    """Return the model's outcome as it is on the page."""
    name = str(found["name"])
    if "not_made" in found:
        return Row(name, "not tried", "not tried", "")
    train, serve = found["train"], found["serve"]
    cells = {"trained": cell(train, LAYOUTS.get(train.get("layout", ""), "")), "served": cell(serve, "yes")}
    if cells["trained"] == LAYOUTS["tree"]:
        cells["trained"] = cell(found["packed"], cells["trained"])
    why = [f"{part}: {reason(each)}" for part, each in zip(cells, (train, serve), strict=True) if reason(each)]
    return Row(name, cells["trained"], cells["served"], "; ".join(why))


def table(rows: Sequence[Row]) -> list[str]:
    """The block of the page: a line of counts, and a line for all models with the same outcome; most models first."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for each in sorted(rows):
        alike.setdefault(each[1:], []).append(f"`{each.name}`")
    right = [sum(each.trained in LAYOUTS.values() for each in rows), sum(each.served == "yes" for each in rows)]
    tried = sum(each.trained != "not tried" for each in rows)
    counts = f"{len(rows)} entries: {tried} made and tried, {right[0]} trained right, {right[1]} served right."
    lines = sorted(alike.items(), key=lambda line: (-len(line[1]), line))
    return [counts, "", *HEADER, *(f"| {' | '.join(values)} | {', '.join(names)} |" for values, names in lines)]


def rows_of(page: str) -> list[Row]:
    """Return the rows that `table` wrote on the page, by model type."""
    lines = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[4:]
    cells = [[each.strip() for each in line[1:-1].split("|")] for line in lines]
    return sorted(Row(name.strip(" `"), *values) for *values, names in cells for name in names.split(","))


def write_page(rows: Iterable[Found]) -> None:
    """Write the table anew."""
    lines = "\n".join(["", "", *table([*map(row, rows)]), "", ""])
    PAGE.write_text(with_block(PAGE.read_text(encoding="utf-8"), BEGIN, END, lines), encoding="utf-8")


def main() -> None:
    """Try models, or write the page."""
    command = parser(__doc__)
    command.add_argument("--out", type=Path, help="file that a line of JSON is appended to for each model")
    command.add_argument("--only", nargs="+", default=NAMES, metavar="MODEL_TYPE", help="these alone")
    command.add_argument("--part", default="1/1", help="of M parts the K-th, as K/M")
    command.add_argument("--length", type=int, default=24, help="tokens of every window, chunk and index")
    command.add_argument(
        "--write", nargs="+", type=Path, metavar="FILE", help="write docs/tables/models.md from these files"
    )
    options = command.parse_args()
    if options.write:
        lines = [line for path in options.write for line in path.read_text(encoding="utf-8").splitlines()]
        write_page({found["name"]: found for found in map(json.loads, lines)}.values())
        return
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    place, parts = map(int, options.part.split("/"))
    for model_type in options.only[place - 1 :: parts]:
        found = examine_apart(model_type, options.length)
        print(row(found), file=sys.stderr, flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
