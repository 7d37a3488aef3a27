"""The trainer runs on a second device: no operator mixes devices, and the host does not wait for each micro-batch.

The device is pretended (`pretended_device`), so this runs without a GPU; `tests/gpu` has the same cases on one. The
embedded engine is in `test_pretended_engine`, losses and supervised training are in `test_pretended_losses`.

Not covered, because the pretended device cannot run it:

- the sharded engine: its collectives need a back end for the device (tried: "No backend type associated with device
  type pretended");
- `trainer.compile`: TorchInductor generates no code for this device (a LoweringException at the first layer);
- kernels of CUDA alone (flash attention, the variable-length kernel, fused norms with gradients): only the rules that
  choose them run here;
- streams and pinned memory (`models/host_copies.py`), and the transport by NCCL.

Several policies need no case for each setting: a policy is trained by the same functions with engines of its own.
"""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.engine_io import GenerationInput, SamplingSpec
from asyncrl.master.graph import load_graph
from asyncrl.models.ranks import Ranks
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import build_step_batch
from asyncrl.trainer.engines.base import PolicyOutputs
from asyncrl.trainer.messages import Publish
from asyncrl.trainer.model import layout_parity
from asyncrl.trainer.model.layers import _Moved
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import TrainingRank, Versions, build_rank
from asyncrl.trainer.settings import KeptOn
from asyncrl.weights.checkpoints import CheckpointWriter, restore
from asyncrl.weights.logprob_probe import read_probe
from tests.device import pretended_device as pretended
from tests.device.pretended_device import DEVICE
from tests.device_cases import (
    TRAIN_CASES,
    EngineCase,
    Folders,
    TrainCase,
    configured,
    data_of,
    engine_of,
    step,
    trajectories,
)
from tests.engine_steps import run
from tests.late_stream import LateStream
from tests.tiny_vlm import KINDS

PIECE = 4096
LIMIT_S = 60.0
CPU = torch.device("cpu")
VARIABLE = "the rule of the variable-length kernel"
CASES = {**TRAIN_CASES, VARIABLE: TRAIN_CASES["packed"]}


def rank_on(config: ExperimentConfig, device: torch.device) -> TrainingRank:
    return build_rank(config, load_graph(config), World(), device)


@pytest.mark.parametrize("name", CASES)
def test_a_train_step_on_a_device_gives_the_cpus_numbers_and_waits_for_it_as_often_with_many_micro_batches(
    folders: Folders, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    config, data = configured(case, folders, micro_batch=2000), data_of(case, folders)
    if name == VARIABLE:
        monkeypatch.setattr(layout_parity, "kernel_exists", lambda *_: True)
    ranks = {device: rank_on(config, device) for device in (CPU, DEVICE)}
    steps = []
    for version, micro_batch in enumerate((2000, 2000, 5 if case.model in KINDS else 90)):
        for rank in ranks.values():
            for engine in rank.engines.values():
                engine._budget = micro_batch  # type: ignore[attr-defined]
        expected = step(config, ranks[CPU], version, CPU, data)
        with pretended.watched() as watch:
            found = step(config, ranks[DEVICE], version, DEVICE, data)
        steps.append(watch)
        assert expected.keys() == found.keys()
        for figure in (each for each in expected if each.endswith(("loss", "grad_norm", "entropy", "optimizer/steps"))):
            if figure.endswith("steps"):
                assert expected[figure] == 2.0 * config.trainer.ppo_epochs
            rounding = 2e-2 if name == "bf16" else 1e-5
            assert found[figure] == pytest.approx(expected[figure], abs=rounding, rel=rounding), figure
    few, many = steps[1:]
    assert sum(many.operators.values()) > 1.2 * sum(few.operators.values()), "more micro-batches were computed"
    more = many.waits - few.waits
    own = "self._features("  # the tower's own code asks the device for sizes, each time that it is trained
    if ranks[DEVICE].policy("actor").attention == AttentionKind.padded:  # transformers looks for packed rows
        own = "self._trunk("
    more = Counter({where: count for where, count in more.items() if own not in where[1]})
    assert not more, f"waits that come with micro-batches:\n{pretended.Watch(waits=more).lines()}"


def test_idle_roles_have_left_the_device(folders: Folders) -> None:
    rank = rank_on(configured(TRAIN_CASES["off-loaded"], folders, micro_batch=2000), DEVICE)
    for role in ("actor", "ref"):
        engine = rank.engines[role]
        parameters = [each for each in engine.parameters().values()]  # type: ignore[attr-defined]
        assert {each.device.type for each in parameters} == {DEVICE.type}
        assert not any(each.untyped_storage().nbytes() for each in parameters)
        with engine.on_device():
            assert all(each.untyped_storage().nbytes() for each in parameters)


def test_inputs_of_layers_that_wait_on_the_host_have_left_the_device(folders: Folders) -> None:
    settings = {"trainer__gradient_checkpointing": True, "trainer__activations_on": KeptOn.host}
    policy = rank_on(configured(TrainCase(settings), folders, micro_batch=200), DEVICE).policy("actor")
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
    folders: Folders, tmp_path: Path
) -> None:
    """On a GPU what is read comes after all copies to the host that are queued, by whichever thread. From the written
    checkpoint another rank goes on with the same numbers."""
    config, stream = configured(TrainCase(), folders, micro_batch=2000), LateStream()
    rank, other = rank_on(config, DEVICE), rank_on(config, DEVICE)
    step(config, rank, 0, DEVICE)
    parts = {"actor": rank.engines["actor"]}
    writer = CheckpointWriter(parts, ["actor"], Ranks(), in_memory=True, copies=stream.copies(PIECE))
    behind: list[int] = []
    stream.release.clear()
    with pretended.watched() as beginning:
        writer.begin(tmp_path / "v1", version=1, state={})
    with pretended.watched() as watch:
        watch.at_wait = lambda: behind.append(stream.queued_bytes)
        after = step(config, rank, 1, DEVICE)
    stream.release.set()
    files = writer.share(tmp_path / "v1").result(LIMIT_S)
    writer.commit(tmp_path / "v1", files, keep=1, protected=())
    writer.close()
    assert not beginning.waits, beginning.lines()
    assert "device" in stream.waits, "the optimizer's step comes after the copies"
    assert behind, "the step reads numbers"
    assert max(behind) <= PIECE
    restore({"actor": other.engines["actor"]}, tmp_path / "v1", Ranks())
    assert step(config, other, 1, DEVICE) == after


@pytest.mark.parametrize("name", ["off-loaded", "adapters", "pictures"])
def test_a_server_on_the_device_scores_a_versions_probe_as_the_trainer_and_a_version_waits_once_for_each_tensor(
    folders: Folders, tmp_path: Path, name: str
) -> None:
    case = TRAIN_CASES[name]
    config = configured(case, folders, micro_batch=2000)
    config.manager.weight_transport = "disk"
    rank, world = rank_on(config, DEVICE), World()
    versions = Versions(config, tmp_path, world, rank, None, DEVICE)
    step(config, rank, 0, DEVICE, data_of(case, folders))
    with pretended.watched() as watch:
        folder = versions.publish(Publish("actor", 1, to_disk=True))
    tensors = len(rank.policy("actor").published_specs())
    scoring = 5 if case.model in KINDS else 3
    assert sum(watch.waits.values()) <= tensors + 10 * scoring, watch.lines()
    engine = engine_of(EngineCase(case.model, {"model_path": str(folders(case.model))}), DEVICE, folders)
    update = engine.update_weights(str(folder), "v1")
    engine.step()
    assert update.result(timeout=0) == 0
    probed = read_probe(folder)
    assert probed is not None
    for number, probe in enumerate(probed.sequences):
        pictures = () if probe.picture is None else (probe.picture.placed,)
        asked = GenerationInput(f"p{number}", probe.token_ids, SamplingSpec(0), 0, pictures=pictures)
        (output,) = run(engine, asked)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[1:] == pytest.approx(probe.logprobs[1:], abs=1e-4)
