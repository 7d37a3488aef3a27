"""Published weights are whole or not there, and load with transformers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from asyncrl.config.run_dir import versions_in
from asyncrl.data.tokenizers import load_tokenizer, template_source
from asyncrl.models.ranks import Ranks
from asyncrl.trainer.model.load_models import load_causal_lm
from asyncrl.weights import atomic_dir
from asyncrl.weights import publishing as weights
from asyncrl.weights.folder_tensors import Rounded, TensorSpec, WholeModel
from asyncrl.weights.loading import apply_weights, load_targets, read_checkpoint, stage_weights
from asyncrl.weights.logprob_probe import PROBE_FILE, LogprobProbe, read_probe
from asyncrl.weights.manifest import MANIFEST_FILE, Manifest, verify
from asyncrl.weights.publishing import SharedFiles

CPU = torch.device("cpu")


def publish(
    model_dir: Path,
    root: Path,
    version: int = 1,
    dtype: str = "float32",
    max_shard_bytes: int = weights.MAX_SHARD_BYTES,
    rounded_to: torch.dtype | None = None,
) -> tuple[Path, torch.nn.Module]:
    model = load_causal_lm(model_dir, dtype, "sdpa", CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 * version)
    whole = WholeModel(model)
    published = weights.publish(
        whole if rounded_to is None else Rounded(whole, rounded_to),
        root,
        role="actor",
        version=version,
        ranks=Ranks(),
        shared=SharedFiles(model.config, weights.tokenizer_assets(model_dir)),
        max_shard_bytes=max_shard_bytes,
    )
    return published, model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["qwen_dir", "llama_dir"])
def test_transformers_loads_what_was_published(
    model: str, dtype: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path, published = publish(request.getfixturevalue(model), tmp_path, dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(str(path), dtype="auto")
    mine, theirs = published.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in mine)
    assert load_tokenizer(path).encode("1+2") == load_tokenizer(request.getfixturevalue(model)).encode("1+2")


def test_a_version_may_be_of_another_type_than_the_trainers(qwen_dir: Path, tmp_path: Path) -> None:
    """What training holds stays as it is."""
    path, model = publish(qwen_dir, tmp_path, rounded_to=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.bfloat16).state_dict()
    assert {entry.dtype for entry in verify(path).tensors.values()} == {"BF16"}
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(loaded[name], tensor.bfloat16()), name
    served = AutoModelForCausalLM.from_pretrained(str(qwen_dir), dtype=torch.float32)
    apply_weights(stage_weights(load_targets(served), path))
    assert all(torch.equal(served.state_dict()[name], tensor.float()) for name, tensor in loaded.items())


def test_the_manifest_lists_every_tensor_once(qwen_dir: Path, tmp_path: Path) -> None:
    path, model = publish(qwen_dir, tmp_path)
    manifest = verify(path)
    assert (manifest.role, manifest.version) == ("actor", 1)
    assert manifest.tensors.keys() == dict(model.named_parameters()).keys()
    assert "lm_head.weight" not in manifest.tensors  # tied to the embedding


def test_the_published_configuration_does_not_name_our_attention(qwen_dir: Path, tmp_path: Path) -> None:
    path, _ = publish(qwen_dir, tmp_path)
    assert "asyncrl" not in (path / "config.json").read_text()


def test_a_version_that_is_there_is_kept(qwen_dir: Path, tmp_path: Path) -> None:
    path, _ = publish(qwen_dir, tmp_path)
    before = (path / "model.safetensors").stat().st_mtime_ns
    publish(qwen_dir, tmp_path)
    assert (path / "model.safetensors").stat().st_mtime_ns == before


def test_a_torn_version_is_written_anew(qwen_dir: Path, tmp_path: Path) -> None:
    path, _ = publish(qwen_dir, tmp_path)
    (path / "model.safetensors").write_bytes(b"")
    publish(qwen_dir, tmp_path)
    assert verify(path).version == 1


@pytest.mark.parametrize(
    ("module", "stage"),
    [
        (atomic_dir, "begin"),
        (weights, "TensorFile"),
        (atomic_dir, "sync"),
        (weights, "write_manifest"),
        (atomic_dir, "commit"),
        (atomic_dir, "rename"),
    ],
)
def test_a_write_that_breaks_off_leaves_nothing_visible(
    module: ModuleType, stage: str, qwen_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(qwen_dir, tmp_path, 1)

    def break_off(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(module, stage, break_off)
        with pytest.raises(OSError, match="disk full"):
            publish(qwen_dir, tmp_path, 2)
    assert versions_in(tmp_path / "actor") == [1]
    path, _ = publish(qwen_dir, tmp_path, 2)  # what was left behind is no obstacle
    assert verify(path).version == 2


def test_what_two_ranks_wrote_is_one_whole_version(qwen_dir: Path, tmp_path: Path) -> None:
    model = load_causal_lm(qwen_dir, "float32", "sdpa", CPU)
    wholes = [WholeModel(model, rank) for rank in (0, 1)]
    files = [f"model-0000{rank + 1}-of-00002.safetensors" for rank in (0, 1)]
    shards = [weights.Shard(rank, files[rank], wholes[0].published_specs()[rank::2]) for rank in (0, 1)]
    manifest = Manifest("actor", 1, {}, weights._entries(shards))
    final = weights.version_dir(tmp_path, "actor", 1)
    ranks = [weights._Writing(wholes[rank], final, manifest, shards, Ranks(rank, 2)) for rank in (0, 1)]
    for rank in ranks:
        rank.begin()
    for rank in ranks:
        rank.write()
    assert versions_in(tmp_path / "actor") == []
    for rank in reversed(ranks):
        rank.finish(SharedFiles(model.config), None)
    whole = verify(final)
    assert {path.name for path in final.iterdir()} == {*whole.files, MANIFEST_FILE}
    loaded = AutoModelForCausalLM.from_pretrained(str(final)).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wholes[0].tensors().items())


class OneBuffer:
    """A model of which there is one tensor at a time, in memory that the next one overwrites."""

    def __init__(self, count: int = 5) -> None:
        self.names = [f"t{index}" for index in range(count)]
        self.left_at: int | None = None

    def published_specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, (3, 1 << 10), torch.float32) for name in self.names]

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(3, 1 << 10)
        for index, name in enumerate(self.names):
            self.left_at = index
            yield name, buffer.fill_(index)
            buffer.fill_(float("nan"))
        self.left_at = None


def publish_from(source: OneBuffer, root: Path, config: PretrainedConfig) -> Path:
    shared = SharedFiles(config)
    return weights.publish(
        source, root, role="actor", version=1, ranks=Ranks(), shared=shared, max_shard_bytes=2 * (3 << 12)
    )


def test_each_tensor_is_written_before_the_next_is_gathered(tmp_path: Path) -> None:
    path = publish_from(OneBuffer(), tmp_path, Qwen2Config())
    assert len(list(path.glob("model-*-of-00003.safetensors"))) == 3
    tensors = read_checkpoint(path)
    assert {name: tensor.unique().tolist() for name, tensor in tensors.items()} == {f"t{i}": [i] for i in range(5)}


def test_a_rank_whose_file_fails_takes_part_to_the_end_so_that_no_other_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, calls = OneBuffer(), []

    def fail_at_the_second(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("disk full")

    monkeypatch.setattr(weights.TensorFile, "write", fail_at_the_second)
    with pytest.raises(OSError, match="disk full"):
        publish_from(source, tmp_path, Qwen2Config())
    assert source.left_at is None


def test_collect_keeps_what_is_asked_for_and_clears_leftovers(qwen_dir: Path, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        publish(qwen_dir, tmp_path, version)
    atomic_dir.begin(weights.version_dir(tmp_path, "actor", 4))
    assert weights.collect(tmp_path, "actor", {2, 3}) == [1]
    assert sorted(path.name for path in (tmp_path / "actor").iterdir()) == [".shared", "v2", "v3"]
    assert weights.collect(tmp_path, "critic", set()) == []


def test_what_is_announced_fits_what_is_on_disk_and_holds_no_weights(qwen_dir: Path, tmp_path: Path) -> None:
    path, _ = publish(qwen_dir, tmp_path / "weights")
    model = load_causal_lm(qwen_dir, "float32", "sdpa", CPU)
    probe = LogprobProbe.of([(1, 2)], [(0.0, -1.0)])
    root = tmp_path / "announced"
    announced = weights.publish(
        WholeModel(model), root, role="actor", version=2, ranks=Ranks(), shared=None, probe=probe
    )
    manifest = verify(announced)
    manifest.check_same_tensors(verify(path))
    assert manifest.files.keys() == {PROBE_FILE}
    assert read_probe(announced) == probe
    assert weights.collect(root, "actor", {3}) == [2]


def test_what_no_version_changes_is_written_once_and_linked(qwen_dir: Path, tmp_path: Path) -> None:
    model = load_causal_lm(qwen_dir, "float32", "sdpa", CPU)
    shared = SharedFiles(model.config, weights.tokenizer_assets(qwen_dir))
    paths = [
        weights.publish(WholeModel(model), tmp_path, role="actor", version=version, ranks=Ranks(), shared=shared)
        for version in (1, 2)
    ]
    for name in ("config.json", "tokenizer.json"):
        assert (paths[0] / name).samefile(paths[1] / name)
    weights.collect(tmp_path, "actor", {2})
    assert verify(paths[1]).version == 2


def test_named_chat_templates_are_published_with_every_version(qwen_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(qwen_dir, folder)
    (folder / "chat_template.jinja").write_text("D")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    model = load_causal_lm(folder, "float32", "sdpa", CPU)
    shared = SharedFiles(model.config, weights.tokenizer_assets(folder))
    for version in (1, 2):
        path = weights.publish(WholeModel(model), tmp_path, role="actor", version=version, ranks=Ranks(), shared=shared)
        assert "additional_chat_templates/tool_use.jinja" in verify(path).files
        assert template_source(path) == {"default": "D", "tool_use": "T"}


def test_the_shared_files_are_written_anew_where_somebody_removed_them(qwen_dir: Path, tmp_path: Path) -> None:
    model = load_causal_lm(qwen_dir, "float32", "sdpa", CPU)
    shared = SharedFiles(model.config, weights.tokenizer_assets(qwen_dir))
    weights.publish(WholeModel(model), tmp_path, role="actor", version=1, ranks=Ranks(), shared=shared)
    shutil.rmtree(tmp_path / "actor")
    path = weights.publish(WholeModel(model), tmp_path, role="actor", version=2, ranks=Ranks(), shared=shared)
    assert load_tokenizer(path).encode("1+2") == load_tokenizer(qwen_dir).encode("1+2")


def test_a_file_system_without_hard_links_gets_copies(
    qwen_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    path, _ = publish(qwen_dir, tmp_path)
    assert verify(path).files.keys() >= {"config.json", "tokenizer.json", "model.safetensors"}


def test_shards_are_dealt_to_ranks_evenly_and_cut_at_the_limit() -> None:
    specs = [TensorSpec(f"t{index}", (1 << 18,), torch.float32) for index in range(8)]  # 1 MiB each
    shards = weights.plan_shards(specs, world=2, max_shard_bytes=3 << 20)
    assert [(shard.rank, [spec.name for spec in shard.specs]) for shard in shards] == [
        (0, ["t0", "t1", "t2"]),
        (0, ["t3"]),
        (1, ["t4", "t5", "t6"]),
        (1, ["t7"]),
    ]


def test_a_sharded_model_has_an_index_that_transformers_follows(llama_dir: Path, tmp_path: Path) -> None:
    path, model = publish(llama_dir, tmp_path, max_shard_bytes=4096)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    loaded = AutoModelForCausalLM.from_pretrained(str(path)).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
