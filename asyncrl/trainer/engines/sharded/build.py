"""Build one rank's part of a model from a model folder, and gather it again as the folder's tensors. No rank ever holds
the whole model.

    on the meta device    transformers' model ─▶ its stage ─▶ its layers' slices (DTensors) ─▶ FSDP2
    then                  memory for the remaining parameters ─▶ this rank's slices read from the folder's safetensors
    to publish            each tensor of a folder whole on the rank that owns it, one parameter at a time (`Gathering`)

FSDP2 wraps the stage at one data-parallel rank too: all parameters are then DTensors on one mesh, and clipping, the
optimizer and checkpoints handle a single kind of parameter.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from asyncrl.models.chunked_logprobs import logits_function
from asyncrl.models.fused_norms import fuse_norms
from asyncrl.models.pictures import Pictures
from asyncrl.models.routing import Routers
from asyncrl.models.transformers_internals import (
    compute_head_in_float32,
    float32_linear,
    has_more_than_head,
    language_model,
    set_attention,
    text_part,
    trunk_of,
)
from asyncrl.trainer.engines.optimizer import embedding_names, local
from asyncrl.trainer.engines.sharded.context_parallel import across_ranks
from asyncrl.trainer.engines.sharded.stage import (
    EMBEDDING,
    LAYERS,
    PassThroughLayer,
    PolicyStage,
    Stage,
    StagePosition,
    ValueStage,
    cut_stage,
)
from asyncrl.trainer.engines.sharded.tensor_parallel import LayoutError, cut_layers, cut_output_embedding, keep_whole
from asyncrl.trainer.model.layers import checkpoint_layers
from asyncrl.trainer.model.layout_parity import SequenceLayout
from asyncrl.trainer.model.load_models import plain_name, prepare_vision
from asyncrl.trainer.model.lora import add_adapters, initialise, is_adapter, published_adapters
from asyncrl.trainer.model.value_models import as_classifier, is_classifier, single_score
from asyncrl.trainer.parallel.placement import Coordinates
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import LoraConfig, VisionMode
from asyncrl.weights.adapters import model_name
from asyncrl.weights.checkpoint_shards import StoredTensors
from asyncrl.weights.folder_tensors import FolderTensor, TensorSpec, folder_tensors
from asyncrl.weights.whole_folder import HEAD, head_shapes


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank of its mesh, whose ranks must all call this.

    A plain tensor is already whole.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    with several_collectives_expected():
        return tensor.full_tensor()


def own_parts(tensor: Tensor, parts: Sequence[FolderTensor]) -> Iterator[tuple[FolderTensor, Tensor]]:
    """Yield those of a parameter's `parts` that this rank holds, each with the tensor to read it into.

    If a part is the whole parameter, that is `tensor` itself, however it is spread. Otherwise it is a view of this
    rank's memory: a parameter of many parts is spread by its first dimension, so a rank has all of a part or nothing of
    it.
    """
    for part in parts:
        if part.is_whole:
            yield part, tensor
            continue
        first = 0
        if isinstance(tensor, DTensor):
            (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
            first = int(chunk.offsets[0])
        mine = local(tensor)
        if mine.shape[1:] != tensor.shape[1:] or part.size[0] != 1:
            raise NotImplementedError(f"{part.name!r} is cut across its dimensions")
        if first <= part.start[0] < first + mine.shape[0]:
            yield part, replace(part, start=(part.start[0] - first, *part.start[1:])).of(mine)


@dataclass(frozen=True)
class Gathering:
    """The published tensors of one role.

    Attributes:
        specs: tensors of the whole model, in its order.
        stages: by name, the pipeline stage that has the tensor.
        folder: by name, position of the tensor in a parameter; a tensor without an entry is a parameter of that name.
        mine: the parameters and buffers of this rank's stage; parts of them.
    """

    specs: Sequence[TensorSpec]
    stages: Mapping[str, int]
    folder: Mapping[str, FolderTensor]
    mine: Mapping[str, Tensor]
    position: RankPosition
    device: torch.device

    def published_specs(self) -> list[TensorSpec]:
        """See `asyncrl.trainer.engines.base.PolicyEngine.published_specs`."""
        return list(self.specs)

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """See `asyncrl.trainer.engines.base.PolicyEngine.gather`."""
        here, grid = self.position.coordinates.pipeline, self.position.grid
        parameter, gathered = "", torch.empty(0)  # the last gathered one: the next tensor may be a part of it too
        for spec in self.specs:
            if spec.name not in owners:
                continue
            owner, stage = owners[spec.name], self.stages[spec.name]
            tensor = None
            if stage == here:
                part = self.folder.get(spec.name)
                name = spec.name if part is None else part.parameter
                if name != parameter:
                    parameter, gathered = name, torch.empty(0)  # freed before the next one needs memory
                    gathered = whole(self.mine[name].detach().to(spec.dtype))
                tensor = (gathered if part is None else part.of(gathered)).contiguous()
            sender = grid.worker_at(Coordinates(stage, 0, 0))
            if grid.coordinates(owner).pipeline != stage:
                if self.position.worker == sender:
                    assert tensor is not None
                    dist.send(tensor, owner)
                elif self.position.worker == owner:
                    tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
                    dist.recv(tensor, sender)
            if self.position.worker == owner:
                assert tensor is not None
                yield spec.name, tensor


_LOGGER = logging.getLogger("torch.distributed.tensor._redistribute")
_BEGINS = "While redistributing from"


@contextmanager
def several_collectives_expected() -> Iterator[None]:
    """Silence torch's warning that gathering a tensor over two mesh dimensions takes two collectives.

    A single collective would need a flattened mesh. Two are fine here: a norm is one number, and whole tensors are
    gathered when weights are published, not in a step.
    """
    _LOGGER.addFilter(_is_other)
    try:
        yield
    finally:
        _LOGGER.removeFilter(_is_other)


def _is_other(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_BEGINS)


_TRUNK = "trunk."


@dataclass(frozen=True)
class BuildPlan:
    """Plan of how a role's model is spread over ranks and stored.

    Attributes:
        mesh: device mesh of all ranks, with the axes `asyncrl.trainer.parallel.world.MESH_AXES`.
        attention: how sequences are laid out, and transformers' name of the attention function.
        context: parts that a micro-batch's tokens are cut into.
        float32_head: compute a policy's logits in float32.
        dtype: type of the arithmetic.
        trained: parameters are then held in fp32, whatever `dtype`; else in `dtype`.
        lora: settings of the adapters, if adapters are trained; all other parameters are then held in `dtype`.
        merge: True if adapters are published merged into the weights.
        seed: seed of the adapters' initial values.
        recompute: keep no activations but each layer's input, and compute the rest again in the backward pass.
        activations_on_host: keep these inputs in host memory.
        replay_routing: True if a policy's routers replay the expert choices of generation.
        vision: treatment of the vision tower of a model that takes pictures.
    """

    mesh: DeviceMesh
    device: torch.device
    attention: SequenceLayout
    dtype: torch.dtype
    trained: bool
    lora: LoraConfig | None = None
    merge: bool = False
    seed: int = 0
    recompute: bool = False
    activations_on_host: bool = False
    replay_routing: bool = False
    vision: VisionMode = VisionMode.train
    context: int = 1
    float32_head: bool = False

    @property
    def stage(self) -> StagePosition:
        """The pipeline stage of this rank."""
        pipeline = self.mesh["pipeline"]
        return StagePosition(pipeline.get_local_rank(), pipeline.size())

    @property
    def fuses_norms(self) -> bool:
        """True if norms are torch's fused kernel; weights in slices are not plain tensors there."""
        return self.device.type == "cuda" and self.mesh["tensor"].size() == 1

    @property
    def held(self) -> torch.dtype:
        """Type of the parameters in memory."""
        return torch.float32 if self.trained and self.lora is None else self.dtype


@dataclass(frozen=True)
class Built:
    """A rank's part of a model.

    Attributes:
        stage: the module that computes; its parameters are DTensors.
        names: parameter of the stage to its name in checkpoints: of a policy, as in a model folder, where a tied output
            embedding has the input's; of a value model as in the stage.
        buffers: persistent buffers of this stage, by their names in a model folder.
        published: all tensors of its model folder in the model's order, the same on all ranks; none of a critic.
        adapters: the adapters, in the same way, by their names in peft's folder.
        stages: pipeline stage of each published tensor.
        folder: by name in the model folder, the parameter that holds the tensor, and which part of it.
        model: the transformers model of this part.
        embeddings: names of the embeddings' weights among `names`.
        tied: name of the embedding that is both input and output embedding; None if they are two parameters.
        routers: routers of the stage's layers, if their choices are replayed.
        pictures: picture processing of the model; None if it is used for text alone.
        in_folder: for a value model, parameter of the stage to its name in the model folder.
    """

    stage: Stage
    names: dict[str, str]
    buffers: dict[str, Tensor]
    model: PreTrainedModel
    published: list[TensorSpec] = field(default_factory=list)
    adapters: list[TensorSpec] = field(default_factory=list)
    stages: dict[str, int] = field(default_factory=dict)
    folder: dict[str, FolderTensor] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()
    tied: str | None = None
    routers: Routers | None = None
    pictures: Pictures | None = None
    in_folder: dict[str, str] = field(default_factory=dict)


def build_policy(path: str | Path, plan: BuildPlan) -> Built:
    """Build this rank's part of the language model in `path`, in evaluation mode.

    Raises:
        LayoutError: the model cannot be spread in this way.
        OSError: `path` holds no model.
    """
    model = _on_meta(language_model(path), path, plan)
    pictures = prepare_vision(model, path, plan.vision, attach=False)
    folder = folder_tensors(model)
    position, tensor = plan.stage, plan.mesh["tensor"]
    trunk = trunk_of(model)
    if trunk is not model.base_model or has_more_than_head(model):
        raise LayoutError(f"{type(model).__name__} is not one trunk and its output embedding; use trainer.engine=flat")
    if plan.lora is not None:
        add_adapters(model, plan.lora, vision=plan.vision == VisionMode.train)
    routers = Routers(trunk, model.config.get_text_config().model_type) if plan.replay_routing else None
    published = _published(model, folder, plan.dtype)
    adapters = published_adapters(model, plan.dtype)
    tied = bool(model.config.get_text_config().tie_word_embeddings)
    head = cast(nn.Module, model.get_output_embeddings())  # type: ignore[no-untyped-call]
    if tied and not isinstance(head, nn.Linear):
        raise LayoutError(f"{type(model).__name__} ties its embeddings in an unknown way; use trainer.engine=flat")
    if tied:  # a separate parameter while layers are cut; shares storage again at the end
        head.weight = nn.Parameter(torch.empty_like(cast(Tensor, head.weight)), requires_grad=plan.lora is None)
    if plan.float32_head:
        compute_head_in_float32(model)
    stages = _StageOf(model, position.stages)
    inputs = trunk.get_input_embeddings()
    embedding = next(name for name, module in trunk.named_modules() if module is inputs)
    logits_of = logits_function(model)
    if not position.last:
        model.set_output_embeddings(None)  # type: ignore[no-untyped-call]
    cut_stage(trunk, position)  # afterwards a model without its input embedding may not find its head
    stage = PolicyStage(
        trunk,
        position,
        head if position.last else None,
        logits_of if position.last else None,
        vocabulary=model.config.get_text_config().vocab_size,
        slices=tensor.get_group() if tensor.size() > 1 else None,
    )
    _cut(stage, model, plan)
    names = _names(stage, model, tied, embedding)
    built = Built(
        stage,
        names,
        _buffers(stage, model),
        model,
        published,
        adapters,
        {part.name: stages(part.parameter) for part in folder}
        | {spec.name: stages(model_name(spec.name)) for spec in adapters},
        {part.name: part for part in folder},
        frozenset(names[name] for name in embedding_names(stage)),
        f"{model.base_model_prefix}.{embedding}.weight" if tied else None,
        routers,
        pictures,
    )
    _shard(built, plan)
    _materialise(built, path, plan, names, folder)
    return built


def build_critic(path: str | Path, plan: BuildPlan) -> Built:
    """Build this rank's part of a critic on the trunk in `path`, with the head of the classifier that is there, else
    with one of zeros.

    Raises: as for `build_policy`.
    """
    return _build_value(path, _on_meta(language_model(path), path, plan), None, plan)


def build_reward_model(path: str | Path, plan: BuildPlan) -> Built:
    """Build this rank's part of the sequence classifier with one label in `path`.

    To be trained, `path` may be a language model's folder: its trunk then gets a new head, at 0.

    Raises:
        ValueError: the classifier has several labels, or no linear head called `score`.
        LayoutError, OSError: as for `build_policy`.
    """
    config = AutoConfig.from_pretrained(str(path))
    new = plan.trained and not is_classifier(config)
    model = _on_meta(AutoModelForSequenceClassification, path, plan, as_classifier(config) if new else config)
    model.config.architectures = [type(model).__name__]
    return _build_value(path, model, single_score(model, path), plan, new_head=new)


def _build_value(
    path: str | Path, model: PreTrainedModel, head: nn.Linear | None, plan: BuildPlan, *, new_head: bool = True
) -> Built:
    pictures = None if head is not None else prepare_vision(model, path, plan.vision, attach=False)
    folder = folder_tensors(model)
    position, trunk = plan.stage, cast(PreTrainedModel, model.base_model)
    hidden = trunk.config.get_text_config().hidden_size
    stored = head_shapes(path) if head is None else {}
    bias = f"{HEAD}.bias" in stored if head is None else head.bias is not None
    published = [] if head is None else _published(model, folder, plan.dtype)
    stages = _StageOf(model, position.stages)
    with torch.device("meta"):
        score = nn.Linear(hidden, 1, bias=bias, dtype=torch.float32) if position.last else None
    if head is None:
        model.set_output_embeddings(None)  # type: ignore[no-untyped-call]
    cut_stage(trunk, position)
    stage = ValueStage(trunk, position, score)
    _cut(stage, model, plan)
    names, in_folder = {name: name for name, _ in stage.named_parameters()}, _names(stage, model, tied=False)
    built = Built(
        stage,
        names,
        _buffers(stage, model),
        model,
        published,
        stages={part.name: stages(part.parameter) for part in folder},
        folder={part.name: part for part in folder},
        embeddings=embedding_names(stage),
        pictures=pictures,
        in_folder=in_folder,
    )
    _shard(built, plan)
    folder += [FolderTensor(name, shape, name, shape, (0,) * len(shape), shape) for name, shape in stored.items()]
    _materialise(built, path, plan, in_folder, folder, ("head.weight", "head.bias") if new_head and not stored else ())
    return built


def _on_meta(kind: Any, path: str | Path, plan: BuildPlan, config: PretrainedConfig | None = None) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(str(path)) if config is None else config
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(config, dtype=plan.held)
    attention = plan.attention.attention
    # Set now and not with the config: models with their own attention accept no other names.
    set_attention(model, across_ranks(attention) if plan.context > 1 else attention)
    model.train(False)
    return model


def _published(model: PreTrainedModel, folder: list[FolderTensor], dtype: torch.dtype) -> list[TensorSpec]:
    """Return the specs of a model folder's tensors: parameters in `dtype` and persistent buffers."""
    buffers = dict(model.named_buffers())
    types = {tensor.name: buffers[tensor.parameter].dtype for tensor in folder if tensor.parameter in buffers}
    return [TensorSpec(tensor.name, tensor.shape, types.get(tensor.name, dtype)) for tensor in folder]


class _StageOf:
    """The pipeline stage of each parameter of `model`, by its name in it; a vision tower's is the first."""

    def __init__(self, model: PreTrainedModel, stages: int) -> None:
        decoder = text_part(trunk_of(model))
        self._decoder = next(name for name, module in model.named_modules() if module is decoder)
        self._trunk = f"{model.base_model_prefix}."
        self._layers, self._stages = len(getattr(decoder, LAYERS, ())), stages

    def __call__(self, parameter: str) -> int:
        if self._stages == 1:
            return 0
        inner = parameter.removeprefix(f"{self._decoder}.")
        if inner == parameter:  # of the tower, or the head
            return 0 if parameter.startswith(self._trunk) else self._stages - 1
        if match := re.match(rf"{LAYERS}\.(\d+)\.", inner):
            stages = range(self._stages)
            return next(i for i in stages if int(match[1]) in StagePosition(i, self._stages).layers(self._layers))
        return 0 if inner.startswith(f"{EMBEDDING}.") else self._stages - 1


def _buffers(stage: Stage, model: PreTrainedModel) -> dict[str, Tensor]:
    """Persistent buffers by their names in a model folder."""
    held = stage.trunk.state_dict().keys()
    named = stage.trunk.named_buffers()
    return {f"{model.base_model_prefix}.{name}": buffer for name, buffer in named if name in held}


def _cut(stage: Stage, model: PreTrainedModel, plan: BuildPlan) -> None:
    """Apply tensor parallelism if there are several slices."""
    mesh = plan.mesh["tensor"]
    if mesh.size() == 1:
        return
    prefix = f"{model.base_model_prefix}."
    styles = {**model.tp_plan, **model.ep_plan}
    trunk_plan = {name.removeprefix(prefix): style for name, style in styles.items() if name.startswith(prefix)}
    cut_layers(stage.trunk, trunk_plan, model.config.get_text_config(), mesh)
    if isinstance(stage, PolicyStage) and stage.lm_head is not None:
        cut_output_embedding(stage.lm_head, mesh, float32_linear if plan.float32_head else F.linear)
    if isinstance(stage, ValueStage) and stage.head is not None:
        keep_whole(stage.head, mesh)


def _names(stage: Stage, model: PreTrainedModel, tied: bool, embedding: str = EMBEDDING) -> dict[str, str]:
    """Name in the model folder by name in the stage."""
    prefix = f"{model.base_model_prefix}."
    other = {"lm_head.weight": f"{prefix}{embedding}.weight"} if tied else {}
    other |= {"head.weight": "score.weight", "head.bias": "score.bias"}
    return {
        name: plain_name(prefix + name.removeprefix(_TRUNK)) if name.startswith(_TRUNK) else other.get(name, name)
        for name, _ in stage.named_parameters(remove_duplicate=False)
    }


def _tie(built: Built) -> None:
    """Make the two parameters of a tied embedding one if this stage has both."""
    stage = built.stage
    if built.tied is not None and stage.position.first and stage.position.last and isinstance(stage, PolicyStage):
        cast(Any, stage.lm_head).weight = cast(Any, stage.trunk.get_input_embeddings()).weight


def _shard(built: Built, plan: BuildPlan) -> None:
    """FSDP2 over the data- and context-parallel ranks: gradients are summed, not averaged."""
    stage, mesh = built.stage, plan.mesh["shard"] if plan.mesh["replica"].size() == 1 else plan.mesh["replica", "shard"]
    _tie(built)
    if plan.fuses_norms:
        fuse_norms(stage, gradients=plan.trained, dtype=plan.dtype, device=plan.device)
    if plan.recompute:
        checkpoint_layers(stage.trunk, built.routers, on_host=plan.activations_on_host)
    low = plan.dtype if plan.dtype != plan.held else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    if isinstance(stage, ValueStage) and stage.head is not None:
        fully_shard(stage.head, mesh=mesh)  # stays in fp32
    # Adapters are small: whole on all data-parallel ranks, their gradients summed by the engine.
    adapters = {parameter for name, parameter in stage.named_parameters() if is_adapter(name)}
    for layer in getattr(text_part(stage.trunk), LAYERS, ()):
        if isinstance(layer, PassThroughLayer):
            continue
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=adapters)
    fully_shard(stage, mesh=mesh, mp_policy=policy, ignored_params=adapters)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # without it gloo refuses


def _materialise(
    built: Built,
    path: str | Path,
    plan: BuildPlan,
    names: dict[str, str],
    folder: list[FolderTensor],
    untrained: tuple[str, ...] = (),
) -> None:
    """Give the stage memory on the device and fill it from the model's folder.

    Args:
        names: names of the model's parameters, by name in the stage.
        folder: position of each tensor of the folder in a parameter.
    """
    stage = built.stage
    stage.to_empty(device=plan.device)
    _tie(built)
    if built.pictures is not None and stage.position.first:
        built.pictures.attach()
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name in untrained:
                parameter.zero_()
    built.buffers.update(_buffers(stage, built.model))  # the previous buffers were on the meta device
    parameters = stage.named_parameters()
    wanted = {
        names[name]: parameter.detach()
        for name, parameter in parameters
        if name not in untrained and not is_adapter(name)
    }
    initialise(((names[name], parameter) for name, parameter in stage.named_parameters()), plan.seed)
    parts: dict[str, list[FolderTensor]] = {name: [] for name in wanted | built.buffers}
    for part in folder:
        if part.parameter in parts:
            parts[part.parameter].append(part)
    _read(Path(path).expanduser(), wanted | built.buffers, parts, f"{built.model.base_model_prefix}.")
    for tensor in stage.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    stage.trunk.initialize_weights()  # type: ignore[no-untyped-call]  # fills what no file holds: buffers like the rotary embedding's


def _read(folder: Path, wanted: dict[str, Tensor], parts: dict[str, list[FolderTensor]], prefix: str) -> None:
    """Fill `wanted` with this rank's slices, one tensor of `folder` after the other."""
    stored = StoredTensors(folder)
    found: dict[str, Tensor] = {}
    for name, tensor in wanted.items():
        for part, target in own_parts(tensor, parts[name]):
            short = part.name.removeprefix(prefix)  # a folder of a trunk alone has no prefix
            key = part.name if part.name in stored.shapes else short if short in stored.shapes else None
            if key is None:
                raise LayoutError(
                    f"{folder} has no tensor {part.name!r} in a safetensors file; save the model with transformers' "
                    "save_pretrained, or use trainer.engine=flat"
                )
            found[key] = target
    stored.read_into(found)
