"""Read the `config.json` of a model folder, and write it for other programs, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG_FILE, TOKENIZER_CONFIG_FILE = "config.json", "tokenizer_config.json"
_ROPE_NAMES = {
    "gpt_neox": ("rotary_emb_base", "rotary_pct"),
    "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct"),
}
"""Names of rotary base and share in transformers 4, where they are not `rope_theta` and `partial_rotary_factor`."""
_LOCAL_NAMES = {
    "modernbert": ("global_rope_theta", "local_rope_theta"),
    "modernbert-decoder": ("global_rope_theta", "local_rope_theta"),
}
"""Names of the rotary bases of full and sliding layers in transformers 4, where they are not `rope_theta` and
`rope_local_base_freq`."""
_LENGTH_BESIDE = ("phi3", "phi4_multimodal")
"""Model types whose original number of positions is beside the scaling in transformers 4, not in it."""
_EXPERTS = ("qwen3_moe", "qwen3_vl_moe_text")
"""Model types whose `num_local_experts` is `num_experts` in transformers 4."""
_TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast", "PythonBackend": "PreTrainedTokenizer"}
"""Names that transformers 4 has for classes of transformers 5, which knows both."""


def read_model_config(folder: str | Path) -> dict[str, Any]:
    """Return the content of `config.json` in the model folder `folder`; `~` is the home directory.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a JSON object.
    """
    found = json.loads((Path(folder).expanduser() / CONFIG_FILE).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def for_all_versions(name: str, content: bytes) -> bytes:
    """Return the `content` of a model folder's file `name` so that transformers 4 and 5 read the same from it.

    transformers 4 silently takes default values for what transformers 5 writes elsewhere: rotary positions in
    `rope_parameters`, the type in `dtype`, the number of experts. Both forms are written. It fails on a tokenizer class
    or a list of tokens under names that only transformers 5 has; their older names are written, which both read. Other
    files, and what is not JSON, stay as they are.
    """
    if name not in (CONFIG_FILE, TOKENIZER_CONFIG_FILE):
        return content
    try:
        described = json.loads(content)
    except ValueError:
        return content
    if not isinstance(described, dict):
        return content
    changed = _both_forms(described) if name == CONFIG_FILE else _older_names(described)
    return content if changed == described else f"{json.dumps(changed, indent=2, ensure_ascii=False)}\n".encode()


def _both_forms(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config, and the configs in it, with rotary positions and type in the form of transformers 4 as well."""
    both = {name: _both_forms(value) if isinstance(value, dict) else value for name, value in config.items()}
    if isinstance(both.get("dtype"), str):
        both["torch_dtype"] = both["dtype"]
    if both.get("model_type") in _EXPERTS and "num_local_experts" in both:
        both["num_experts"] = both["num_local_experts"]
    if isinstance(rope := both.get("rope_parameters"), dict):
        kind = str(both.get("model_type"))
        theta, share = _ROPE_NAMES.get(kind, ("rope_theta", "partial_rotary_factor"))
        if isinstance(full := rope.get("full_attention"), dict):
            theta, local = _LOCAL_NAMES.get(kind, (theta, "rope_local_base_freq"))
            sliding = rope.get("sliding_attention")
            if isinstance(sliding, dict) and sliding.get("rope_theta") not in (None, full.get("rope_theta")):
                both[local] = sliding["rope_theta"]
            rope = full
        if "rope_theta" in rope:
            both[theta] = rope["rope_theta"]
        if "partial_rotary_factor" in rope:
            both[share] = rope["partial_rotary_factor"]
        scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
        plain = scaling.keys() <= {"rope_type", "type"} and scaling.get("rope_type", "default") == "default"
        if scaling.get("rope_type") == "longrope":  # Phi's classes take these keys and no other
            scaling["type"] = scaling.pop("rope_type")
            if kind in _LENGTH_BESIDE and "original_max_position_embeddings" in scaling:
                both["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
        both["rope_scaling"] = None if plain else scaling
    return both


def _older_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's config under the names of transformers 4."""
    older = dict(config)
    kind = older.get("tokenizer_class")
    if isinstance(kind, str) and kind in _TOKENIZER_CLASSES:
        older["tokenizer_class"] = _TOKENIZER_CLASSES[kind]
    if isinstance(older.get("extra_special_tokens"), list):
        tokens = older.pop("extra_special_tokens")
        if tokens:
            older["additional_special_tokens"] = tokens
    return older
