"""Low-rank adapters in a folder, in peft's layout, and merged into the weights that they adapt.

    adapter_model.safetensors    base_model.model.<layer>.lora_A.weight [rank, in], <...>.lora_B.weight [out, rank]
    adapter_config.json          rank, alpha, the folder of the base

A layer with an adapter computes W x + (alpha / rank) B A x (Hu et al., "LoRA", 2021). A layer with the weights
W + (alpha / rank) B A computes the same. Layers that keep W transposed, [in, out], as GPT-2's do, have `fan_in_fan_out`
in the configuration. W is always read from the base's folder, never computed back from a merged weight, so rounding
errors do not add up over versions. Adapters are published in the type in which the trainer holds the base, and W is
first rounded to that type, as in the trainer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from asyncrl.comm.typed import decode_json
from asyncrl.weights.loading import match_weights, read_checkpoint
from asyncrl.weights.manifest import ADAPTERS_FILE, WeightUpdateError

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def published_name(name: str) -> str:
    """Return an adapter's name in peft's folder, from its name in the model."""
    return _PREFIX + name


def model_name(published: str) -> str:
    """Return an adapter's name in the model: the inverse of `published_name`."""
    return published.removeprefix(_PREFIX)


class _Config(msgspec.Struct):
    """`adapter_config.json`. Fields of unsupported features have the value that turns the feature off."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    base_model_name_or_path: str | None = None
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: list[str] | None = None


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters from a folder.

    Attributes:
        base: folder of the base model, from the adapters' configuration.
        scale: alpha / rank.
        layers: A [rank, in] and B [out, rank], by the name of the weight [out, in] that they adapt.
        transposed: True if these weights are [in, out].
    """

    base: str | None
    scale: float
    layers: dict[str, tuple[Tensor, Tensor]]
    transposed: bool = False

    def merged(self, name: str, base: Tensor) -> Tensor:
        """Merge the adapter of the weight `name` into its base weight `base`, [out, in] (or [in, out]); fp32.

        Raises:
            WeightUpdateError: their shapes differ.
        """
        a, b = self.layers[name]
        product = b.float() @ a.float()
        if self.transposed:
            product = product.T
        if base.shape != product.shape:
            raise WeightUpdateError(
                f"{name} is {list(base.shape)} in the base model, its adapter makes {list(product.shape)}"
            )
        return base.to(a.dtype).float() + self.scale * product


def read_adapters(folder: Path) -> Adapters:
    """Read the adapters in `folder`.

    Raises:
        WeightUpdateError: the adapters cannot be read, or are of a kind that is not merged here.
    """
    tensors, file = read_checkpoint(folder), folder / ADAPTERS_FILE
    try:
        content = file.read_bytes()
    except OSError as error:
        raise WeightUpdateError(f"{file} is not a configuration of adapters: {error}") from error
    return described_by(content, tensors, folder)


def described_by(content: bytes, tensors: Mapping[str, Tensor], folder: Path) -> Adapters:
    """Assemble adapters from `tensors`, by their published names, and the `content` of their configuration.

    Errors name `folder`.

    Raises:
        WeightUpdateError: see `read_adapters`.
    """
    file = folder / ADAPTERS_FILE
    try:
        config = decode_json(content, _Config)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WeightUpdateError(f"{file} is not a configuration of adapters: {error}") from error
    plain = _Config(
        config.r,
        config.lora_alpha,
        base_model_name_or_path=config.base_model_name_or_path,
        fan_in_fan_out=config.fan_in_fan_out,
    )
    for field in _Config.__struct_fields__:
        value, wanted = getattr(config, field), getattr(plain, field)
        if (value or None) != (wanted or None):
            raise WeightUpdateError(f"{file} has {field}={value!r}, which is not merged here; only {wanted!r} is")
    if config.r < 1:
        raise WeightUpdateError(f"{file} has r={config.r}; a rank is at least 1")
    found = dict(tensors)
    layers: dict[str, tuple[Tensor, Tensor]] = {}
    while found:
        name = next(iter(found))
        layer = name.removesuffix(_A).removesuffix(_B)
        a, b = found.pop(layer + _A, None), found.pop(layer + _B, None)
        if layer == name or not name.startswith(_PREFIX) or a is None or b is None:
            raise WeightUpdateError(f"{str(folder)!r} holds {name!r}, which is no A with a B: not adapters as peft's")
        if not (a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1] == config.r):
            raise WeightUpdateError(
                f"the adapter of {layer} in {str(folder)!r} is A {list(a.shape)}, B {list(b.shape)}; of rank "
                f"{config.r} they are [{config.r}, in] and [out, {config.r}]"
            )
        layers[f"{model_name(layer)}.weight"] = (a, b)
    return Adapters(config.base_model_name_or_path, config.lora_alpha / config.r, layers, config.fan_in_fan_out)


def stage_adapters(
    targets: Mapping[str, Tensor], folder: Path, base: Path, restored: Collection[str] | None
) -> tuple[list[tuple[Tensor, Tensor]], frozenset[str]]:
    """Return pairs of a parameter and its new value: the adapters in `folder`, merged with the layers of the folder
    `base`; and the names of these layers.

    Like `asyncrl.weights.loading.stage_weights`, this changes nothing yet.

    Args:
        targets: the model's parameters and buffers by name.
        restored: names of other parameters that differ from `base` and must be restored; None if any may differ.

    Raises:
        WeightUpdateError: adapters, `base` and the model do not fit together, or the adapters are of another base.
    """
    adapters = read_adapters(folder)
    if Path(adapters.base or "") != base:
        raise WeightUpdateError(
            f"{str(folder)!r} has adapters of {adapters.base!r}, this server started with {str(base)!r}"
        )
    names = None if restored is None else {*restored, *adapters.layers}
    values = read_checkpoint(base, names)
    if missing := sorted(adapters.layers.keys() - values.keys()):
        raise WeightUpdateError(
            f"the base model {str(base)!r} has no {missing[0]!r} ({len(missing)} missing), for which there are "
            "adapters; its weight names differ from transformers': load and save it again"
        )
    for name in adapters.layers:
        values[name] = adapters.merged(name, values[name])
    wanted = targets if names is None else {name: target for name, target in targets.items() if name in names}
    return match_weights(wanted, values, base), frozenset(adapters.layers)
