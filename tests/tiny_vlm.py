"""Vision-language models of each family with some 0.15 M random weights, as folders that transformers reads.

A word or a digit is a token. The chat template is that of transformers 5: it writes the processor's `image_token` once
for a picture.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from PIL import Image, ImageDraw
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.models.picture_rules import PictureProcessor
from asyncrl.models.pictures import Pictures

WORDS = [*"0123456789", *"abcdefghijklmnopqrstuvwxyz", " ", "?", ".", "\n", "red", "green", "blue", "how", "many"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}"
    "{% if c.type == 'image' %}IMAGE{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
HIDDEN, HEADS = 64, 4
_TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_SEE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
PATCH = 14


def _tokenizer(specials: list[str], image: str, **named: str) -> Any:
    base = ["<pad>", "<end>", "<u>", "<a>", "<t>", "<s>", *specials]
    vocabulary = {word: number for number, word in enumerate([*base, "<unk>", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    longest_first = sorted(WORDS, key=len, reverse=True)
    pattern = "|".join(word if word.isalnum() else f"\\{word}" if word != "\n" else "\\n" for word in longest_first)
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        extra_special_tokens={**named} if named else [each for each in base if each not in ("<pad>", "<end>")],
    )
    if named:
        fast.add_special_tokens({"additional_special_tokens": base[2:]})
    fast.chat_template = TEMPLATE.replace("IMAGE", image)
    return fast


def _text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    own = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return {**_TEXT, **own, "tie_word_embeddings": False, **more}


def _qwen(kind: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image, video = "<|image_pad|>", "<|video_pad|>"
    around = ["<|vision_start|>", "<|vision_end|>"]
    tokenizer = _tokenizer([*around, image, video], around[0] + image + around[1])
    patch, merge, ids = 16 if kind == "qwen3_vl" else PATCH, 2, tokenizer.convert_tokens_to_ids
    unit = (patch * merge) ** 2
    images = Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=merge, size={"shortest_edge": unit, "longest_edge": 16 * unit}
    )
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}
    text = _text(tokenizer, rope_parameters=rope)
    common = {
        "image_token_id": ids(image),
        "video_token_id": ids(video),
        "vision_start_token_id": ids(around[0]),
        "vision_end_token_id": ids(around[1]),
        "tie_word_embeddings": False,
    }
    see: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": patch, "spatial_merge_size": merge}
    wide = {"hidden_size": 32, "out_hidden_size": HIDDEN, "intermediate_size": 64}
    if kind == "qwen2_vl":
        see |= {"embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2, "in_chans": 3}  # SGLang reads the last
        config, model = hf.Qwen2VLConfig, hf.Qwen2VLForConditionalGeneration
    elif kind == "qwen2_5_vl":
        see |= {**wide, "window_size": 112, "fullatt_block_indexes": [1]}
        config, model = hf.Qwen2_5_VLConfig, hf.Qwen2_5_VLForConditionalGeneration
    else:
        see |= {**wide, "num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
        text["head_dim"] = HIDDEN // HEADS
        rope["mrope_interleaved"] = True  # as in the published folders: SGLang reads it
        config, model = hf.Qwen3VLConfig, hf.Qwen3VLForConditionalGeneration
    return model(config(text_config=text, vision_config=see, **common)), tokenizer, images, {}


def _glm4v(kind: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    image, video = "<|image|>", "<|video|>"
    around = ["<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"]
    tokenizer = _tokenizer([*around, image, video], around[0] + image + around[1])
    ids, unit = tokenizer.convert_tokens_to_ids, (PATCH * 2) ** 2
    images = Glm4vImageProcessorPil(
        patch_size=PATCH, merge_size=2, size={"shortest_edge": 2 * unit, "longest_edge": 32 * unit}
    )
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    see = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "intermediate_size": 64,
        "patch_size": PATCH,
        "image_size": 56,
        "spatial_merge_size": 2,
    }
    config = hf.Glm4vConfig(
        text_config=_text(tokenizer, rope_parameters=rope),
        vision_config=see,
        image_token_id=ids(image),
        video_token_id=ids(video),
        image_start_token_id=ids(around[0]),
        image_end_token_id=ids(around[1]),
        video_start_token_id=ids(around[2]),
        video_end_token_id=ids(around[3]),
        tie_word_embeddings=False,
    )
    return hf.Glm4vForConditionalGeneration(config), tokenizer, images, {}


def _idefics(kind: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    scale, side, splits = 2, 56, kind == "idefics3"
    rows = [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
    tokenizer = _tokenizer(
        ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *rows], "<image>"
    )
    made = SmolVLMImageProcessorPil if kind == "smolvlm" else Idefics3ImageProcessorPil
    longest = 2 * side if splits else side  # Idefics3 cuts pictures into tiles, SmolVLM here does not
    images = made(size={"longest_edge": longest}, max_image_size={"longest_edge": side}, do_image_splitting=splits)
    name = "SmolVLM" if kind == "smolvlm" else "Idefics3"
    config = getattr(hf, f"{name}Config")(
        text_config=_text(tokenizer, model_type="llama"),
        vision_config={**_SEE, "image_size": side, "patch_size": PATCH},
        scale_factor=scale,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = getattr(hf, f"{name}ForConditionalGeneration")(config)
    return model, tokenizer, images, {"image_seq_len": (side // PATCH // scale) ** 2}


def _llava(kind: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    side = 42
    tokenizer = _tokenizer(["<image>"], "<image>")
    images = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    config = hf.LlavaConfig(
        text_config=_text(tokenizer, model_type="llama"),
        vision_config={
            **_SEE,
            "model_type": "clip_vision_model",
            "num_hidden_layers": 3,
            "image_size": side,
            "patch_size": PATCH,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        image_seq_length=(side // PATCH) ** 2,
        tie_word_embeddings=False,
    )
    extra = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return hf.LlavaForConditionalGeneration(config), tokenizer, images, {**extra, "image_token": "<image>"}


def _onevision(kind: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    side = 42
    tokenizer = _tokenizer(["<image>", "<video>"], "<image>")
    pinpoints = [[side, side], [side, 2 * side], [2 * side, side]]
    images = LlavaOnevisionImageProcessorPil(size={"height": side, "width": side}, image_grid_pinpoints=pinpoints)
    config = hf.LlavaOnevisionConfig(
        text_config=_text(tokenizer, model_type="qwen2"),
        vision_config={**_SEE, "model_type": "siglip_vision_model", "image_size": side, "patch_size": PATCH},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_grid_pinpoints=pinpoints,
        tie_word_embeddings=False,
    )
    extra = {"num_image_tokens": (side // PATCH) ** 2, "vision_feature_select_strategy": "full"}
    return hf.LlavaOnevisionForConditionalGeneration(config), tokenizer, images, extra


def _internvl(kind: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    side = 56
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = _tokenizer(list(named.values()), "<IMG_CONTEXT>", **named)
    images = GotOcr2ImageProcessorPil(
        size={"height": side, "width": side}, crop_to_patches=True, min_patches=1, max_patches=2
    )
    tokens = (side // PATCH // 2) ** 2
    config = hf.InternVLConfig(
        text_config=_text(tokenizer, model_type="qwen2"),
        vision_config={**_SEE, "image_size": [side, side], "patch_size": [PATCH, PATCH]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=tokens,
        tie_word_embeddings=False,
    )
    return hf.InternVLForConditionalGeneration(config), tokenizer, images, {"image_seq_length": tokens}


def _gemma3(kind: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    side = 56
    named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer(list(named.values()), "<boi>", **named)
    tokens = (side // PATCH // 2) ** 2
    ids = tokenizer.convert_tokens_to_ids
    config = hf.Gemma3Config(
        text_config=_text(tokenizer, head_dim=HIDDEN // HEADS, sliding_window=32),
        vision_config={**_SEE, "image_size": side, "patch_size": PATCH},
        mm_tokens_per_image=tokens,
        boi_token_index=ids("<boi>"),
        eoi_token_index=ids("<eoi>"),
        image_token_index=ids("<image_soft_token>"),
        tie_word_embeddings=False,
    )
    images = Gemma3ImageProcessorPil(size={"height": side, "width": side})
    return hf.Gemma3ForConditionalGeneration(config), tokenizer, images, {"image_seq_length": tokens}


def _mistral3(kind: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    tokenizer = _tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"], "[IMG]")
    config = hf.Mistral3Config(
        text_config=_text(tokenizer, model_type="mistral", head_dim=HIDDEN // HEADS, sliding_window=None),
        vision_config={**_SEE, "model_type": "pixtral", "image_size": 112, "patch_size": PATCH, "head_dim": 16},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    images = PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 28, "width": 28})
    return (
        hf.Mistral3ForConditionalGeneration(config),
        tokenizer,
        images,
        {"patch_size": PATCH, "spatial_merge_size": 2},
    )


def _qwen3_moe(kind: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    dense, tokenizer, images, extra = _qwen("qwen3_vl")
    text, see = dense.config.text_config.to_dict(), dense.config.vision_config.to_dict()
    del text["model_type"], see["model_type"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    ids = {name: value for name, value in dense.config.to_dict().items() if name.endswith("_token_id")}
    config = hf.Qwen3VLMoeConfig(text_config={**text, **experts}, vision_config=see, tie_word_embeddings=False, **ids)
    return hf.Qwen3VLMoeForConditionalGeneration(config), tokenizer, images, extra


class _NamedOnly:
    """An image processor that cannot be built here, as its configuration in a folder."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(self.settings))


def _lfm2(kind: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    tokenizer = _tokenizer(["<image>"], "<image>")
    layers = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    config = hf.Lfm2VlConfig(
        text_config=_text(tokenizer, model_type="lfm2", **layers),
        vision_config={**_SEE, "model_type": "siglip2_vision_model", "patch_size": PATCH, "num_patches": 16},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projector_hidden_size=64,
        tie_word_embeddings=False,
    )
    images = _NamedOnly(image_processor_type="Lfm2VlImageProcessor", encoder_patch_size=PATCH)
    return hf.Lfm2VlForConditionalGeneration(config), tokenizer, images, {}


_FAMILIES: dict[str, Callable[[str], tuple[Any, Any, Any, dict[str, Any]]]] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "glm4v": _glm4v,
    "smolvlm": _idefics,
    "idefics3": _idefics,
    "llava": _llava,
    "llava_onevision": _onevision,
    "internvl": _internvl,
    "gemma3": _gemma3,
    "mistral3": _mistral3,
}
KINDS = tuple(_FAMILIES)
_REFUSED: dict[str, Callable[[str], tuple[Any, Any, Any, dict[str, Any]]]] = {
    "qwen3_vl_moe": _qwen3_moe,
    "lfm2_vl": _lfm2,
}
REFUSED_KINDS = tuple(_REFUSED)


def make_folder(kind: str, folder: Path, seed: int = 0, spread: float = 0.15) -> Path:
    """Write a model of the family `kind` to `folder`, with its tokenizer and what reads pictures in.

    `kind` is one of `KINDS`, or of `REFUSED_KINDS`, which asyncrl refuses.
    `spread` of the weights is so large that attention is not uniform, which would hide errors.
    """
    torch.manual_seed(seed)
    model, tokenizer, images, extra = (_FAMILIES | _REFUSED)[kind](kind)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=spread)
    model.generation_config = hf.GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    images.save_pretrained(str(folder))
    (folder / "processor_config.json").write_text(json.dumps(extra))
    return folder


class Rendered(NamedTuple):
    """A prompt as it travels: ids with placeholders, and the pictures with their spans; and its text."""

    ids: list[int]
    placed: tuple[PlacedPicture, ...]
    text: str


def render(folder: Path, *parts: str | Picture) -> Rendered:
    """A prompt of text and pictures for the model in `folder`."""
    processor = PictureProcessor.of(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(str(folder))
    texts = [part if isinstance(part, str) else processor.text_of_size(*part.size) for part in parts]
    ids = tokenizer("".join(texts))["input_ids"]
    places = [at for at, token in enumerate(ids) if token == processor.token_id]
    placed, begin = [], 0
    for part, text in zip(parts, texts, strict=True):
        if isinstance(part, Picture):
            own = places[begin : begin + text.count(processor.placeholder)]
            placed.append(PlacedPicture(own[0], own[-1] - own[0] + 1, part))
            begin += len(own)
    return Rendered(ids, tuple(placed), "".join(texts))


def shown_inputs(pictures: Pictures, shown: list[int]) -> dict[str, torch.Tensor]:
    """Arguments of a plain forward of one sequence of `pictures.ids`, within `pictures.holding` its ids."""
    ids, places = torch.tensor([shown]), torch.from_numpy(pictures.positions(shown).copy())
    types = {"token_type_ids": pictures.types(ids)} if pictures.two_way else {}
    return {"input_ids": ids, "position_ids": places[:, None] if pictures.three_positions else places[:1], **types}


def picture(seed: int = 0, width: int = 56, height: int = 56) -> Picture:
    """A drawing of three coloured discs, another one for each seed."""
    draw_seed = torch.Generator().manual_seed(seed)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(3):
        x, y, c = (int(torch.randint(0, n, (), generator=draw_seed)) for n in (width - 14, height - 14, 3))
        draw.ellipse([x, y, x + 12, y + 12], fill=("red", "green", "blue")[c])
    return Picture.from_image(image)
