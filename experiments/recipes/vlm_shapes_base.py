"""Make the base model of the experiment `vlm_shapes`: a tiny Qwen2-VL, trained until it sees some of the shapes.

    python experiments/recipes/vlm_shapes_base.py

Some forty supervised steps on the training pictures, by a plain loop over transformers' own model: so few that the
model answers four held-out pictures in ten, which leaves RL something to select. Takes seconds.

Weights are drawn with a spread of 1 / sqrt(inputs): the 0.02 of transformers' configs is for wide models, and keeps one
of 64 at chance for hundreds of steps.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.data.datasets import Dataset, load_dataset
from asyncrl.models.picture_rules import PictureProcessor

CONFIG = load_experiment("vlm_shapes", [])
assert isinstance(CONFIG, ExperimentConfig)
FOLDER, SHAPES = Path(CONFIG.model.path or ""), CONFIG.dataset.path
RECORD_FILE = "base_model.json"
BATCH, RATE, STEPS, SEED = 48, 2e-3, 44, 0
LOOK_EVERY = 4

PATCH, MERGE, SIDE = 4, 2, 16
"""Pixels of a patch's side, patches of the side of a token, and pixels of a picture's side: four tokens a picture."""
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", START, END, IMAGE, VIDEO]
"""As Qwen2-VL names them."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}"
    + START
    + IMAGE
    + END
    + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNKNOWN = "<unk>"
WORDS = [*"0123456789", "red", "?", "user", "assistant", "\n", UNKNOWN]


def shapes(split: str, *, blind: bool = False) -> Dataset:
    """The pictures of the experiment."""
    return load_dataset(SHAPES, {"blind": blind}, split, SEED)


def make_tokenizer(words: Sequence[str] = WORDS) -> Any:
    """A token for each word that the task has, and Qwen2-VL's special ones."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    pattern = "|".join(re.escape(word) for word in words if word != UNKNOWN)
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    raw.decoder = decoders.Fuse()
    made = hf.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=SPECIAL[0],
        eos_token="<|im_end|>",
        unk_token=UNKNOWN,
        extra_special_tokens=[each for each in SPECIAL if each not in ("<|endoftext|>", "<|im_end|>")],
    )
    made.chat_template = TEMPLATE
    return made


def make_untrained(tokenizer: Any) -> Any:
    """Qwen2-VL of 0.1 M parameters."""
    ids = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4},
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    vision = {
        "depth": 1,
        "num_heads": 2,
        "embed_dim": 32,
        "hidden_size": text["hidden_size"],
        "mlp_ratio": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "in_chans": 3,  # the name by which SGLang reads it
    }
    config = hf.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids(IMAGE),
        video_token_id=ids(VIDEO),
        vision_start_token_id=ids(START),
        vision_end_token_id=ids(END),
        tie_word_embeddings=False,
    )
    torch.manual_seed(SEED)
    model = hf.Qwen2VLForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    model.generation_config = hf.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def write(folder: Path, model: Any, tokenizer: Any, side: int = SIDE) -> None:
    """Write model, tokenizer and what reads pictures of `side` pixels in to `folder`."""
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    size = {"shortest_edge": side**2, "longest_edge": side**2}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size).save_pretrained(str(folder))


@dataclass(frozen=True)
class Batches:
    """All rows of a split as tensors for a model's forward; `B` rows, all prompts of one length `T`.

    The last two tokens of a row are its answer: a digit and the end.
    """

    folder: Path
    rows: Dataset

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """`input_ids` and `mm_token_type_ids` [B, T], `pixel_values` [B, patches, values], `image_grid_thw` [B, 3]."""
        tokenizer: Any = hf.AutoTokenizer.from_pretrained(str(self.folder))
        processor = PictureProcessor.of(self.folder)
        shown = processor.text_of_size(SIDE, SIDE)
        ids, pixels, grids = [], [], []
        for number in range(len(self.rows)):
            row = self.rows.row(number)
            parts = [{"type": "image"}, {"type": "text", "text": row["prompt"]}]
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
            )
            text = text.replace(processor.marker, shown) + row["answer"]
            ids.append([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
            seen = processor.images(row["images"], return_tensors="pt")
            pixels.append(seen["pixel_values"])
            grids.append(seen["image_grid_thw"])
        input_ids = torch.tensor(ids)
        return {
            "input_ids": input_ids,
            "mm_token_type_ids": (input_ids == processor.token_id).long(),
            "pixel_values": torch.stack(pixels),
            "image_grid_thw": torch.cat(grids),
        }

    def answers(self, model: Any, chosen: slice | list[int] = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [b, 2, V] at the places of the answers of the rows `chosen`, and the right tokens [b, 2]."""
        given = {name: tensor[chosen] for name, tensor in self.tensors.items()}
        right = given["input_ids"][:, -2:]
        given["pixel_values"] = given["pixel_values"].flatten(0, 1)
        return model(**given, use_cache=False).logits[:, -3:-1].float(), right

    @torch.no_grad()
    def accuracy(self, model: Any) -> float:
        """Share of rows whose digit and end are both the likeliest tokens: the accuracy of greedy answers."""
        logits, right = self.answers(model)
        return float((logits.argmax(-1) == right).all(1).float().mean())


def accuracy_of(folder: Path, *, blind: bool = False) -> float:
    """Greedy accuracy of the model in `folder` on held-out pictures."""
    model = hf.AutoModelForImageTextToText.from_pretrained(str(folder)).eval()
    return Batches(folder, shapes("held_out", blind=blind)).accuracy(model)


def write_record(folder: Path, experiment: str, found: Mapping[str, Any]) -> None:
    """Write beside the model in `folder` how it was made, what was `found` and its SHA-256s, and print `found`."""
    files = sorted(file for file in folder.iterdir() if file.name != RECORD_FILE)
    record = {
        "experiment": experiment,
        "made_with": {"torch": torch.__version__, "transformers": hf.__version__},
        **found,
        "sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
    }
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(folder.name, json.dumps(found), flush=True)


def make(folder: Path) -> None:
    """Train the model and write it to `folder`, with a record of it."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_untrained(tokenizer)
    shutil.rmtree(folder, ignore_errors=True)
    write(folder, model, tokenizer)
    train, held_out = Batches(folder, shapes("train")), Batches(folder, shapes("held_out"))
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0), random.Random(SEED)
    for step in range(1, STEPS + 1):
        logits, right = train.answers(model, draw.sample(range(len(train.rows)), BATCH))
        loss = F.cross_entropy(logits.flatten(0, 1), right.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % LOOK_EVERY == 0:
            accuracy = held_out.accuracy(model)
            print(f"step {step}: loss {loss.item():.3f}, held-out accuracy {accuracy:.3f}", flush=True)
    write(folder, model, tokenizer)
    write_record(folder, "vlm_shapes", {"steps": STEPS, "greedy_accuracy": round(accuracy, 4)})


if __name__ == "__main__":
    make(FOLDER)
