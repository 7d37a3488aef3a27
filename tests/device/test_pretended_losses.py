"""Every built-in part of an objective and every objective of supervised training on a second device.

They give the CPU's numbers, mix no devices, and let the host wait for no micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.critic import ValueObjective
from asyncrl.algorithms.inputs import AdvantageInputs, LossTokens, PolicyLossInputs, SelectionInputs, ValueLossInputs
from asyncrl.algorithms.objective import Objective
from asyncrl.algorithms.registry import Choice, ObjectiveSpec
from asyncrl.api.picture import Picture
from asyncrl.config.plugin_code.catalog import known, resolve
from asyncrl.config.setting import ChoiceConfig
from asyncrl.plugins.rewards.video_encoder import VJEPA2Encoder
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import OptimizerName
from asyncrl.trainer.supervised.objectives import engine_settings, make_objective
from asyncrl.trainer.supervised.settings import SFTConfig
from tests.device import pretended_device as pretended
from tests.device.pretended_device import DEVICE
from tests.unit.plugins.rewards.test_srpo import ENCODER
from tests.unit.trainer.supervised.test_preferences import BATCH
from tests.unit.trainer.supervised.trl_values import policy, reward_model

CPU = torch.device("cpu")
S, LENGTH, V = 4, 6, 5
T = S * LENGTH
PARAMS: dict[str, dict[str, Any]] = {"constant": {"divisor": 8.0}}
PARTS = [
    (kind, name) for kind in ("policy_loss", "correction", "selection", "kl", "aggregation") for name in known(kind)
]


def found(kind: str, name: str, params: Any) -> Any:
    return resolve(kind, name, {**PARAMS.get(name, {}), **params}, [])


def columns(device: torch.device) -> Iterator[Tensor]:
    """Random numbers [T], the same ones for every device."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(T, generator=generator).to(device)


def seq_ids(device: torch.device) -> Tensor:
    return torch.arange(S).repeat_interleave(LENGTH).to(device)


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_a_part_of_an_objective_gives_the_cpus_loss_without_a_wait(kind: str, name: str) -> None:
    spec = ObjectiveSpec(
        **{"kl": Choice("k3"), "kl_coef": 0.1, "entropy_coef": 0.1, "log_ratio_coef": 0.1, kind: Choice(name)}
    )
    objective, losses = Objective(spec, found), []
    for device in (CPU, DEVICE):
        drawn = columns(device)
        logprobs, prox, behave, advantages, ref, entropy = (next(drawn) * 0.3 - 1.0 for _ in range(6))
        mask = (torch.arange(T) % LENGTH > 1).to(device)
        dists = [next(drawn)[:, None].expand(T, V).mul(torch.arange(V, device=device)).log_softmax(-1) for _ in "ab"]
        chosen = objective.selection(SelectionInputs(prox[mask], behave[mask], advantages[mask]))
        keep = torch.ones_like(mask)
        keep[mask] = chosen.keep_T
        penalty = None if chosen.penalty_T is None else torch.zeros_like(prox).masked_scatter(mask, chosen.penalty_T)
        inputs = PolicyLossInputs(
            logprobs.requires_grad_(),
            prox,
            behave,
            advantages + 1.0,
            mask,
            seq_ids(device),
            S,
            versions_T=mask.long() - 1,
            current_version=1,
            entropy_T=entropy,
            selection=type(chosen)(keep, penalty) if objective.selects else None,
            episode_tokens_T=torch.full((T,), 8.0, dtype=torch.float64, device=device),
        )
        with pretended.watched() as watch:
            loss, stats = objective(inputs, ref, 3.0, log_probs_TV=dists[0], ref_log_probs_TV=dists[1])
            loss.backward()  # type: ignore[no-untyped-call]
        assert not watch.waits, watch.lines()
        assert logprobs.grad is not None
        losses.append((loss.item(), logprobs.grad.cpu(), {key: stat.value() for key, stat in stats.items()}))
    (expected, gradient, figures), (got, other, reported) = losses
    assert got == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(other, gradient)
    assert reported == pytest.approx(figures, abs=1e-6)


@pytest.mark.parametrize("name", known("advantage"))
def test_an_estimator_gives_the_cpus_advantages(name: str) -> None:
    reported = []
    for device in (CPU, DEVICE):
        drawn = columns(device)
        values, rewards = next(drawn), next(drawn)
        output = found("advantage", name, {})(
            AdvantageInputs(
                rewards_S=rewards[:S],
                group_ids_S=torch.tensor([0, 0, 1, 1], device=device),
                mask_T=(torch.arange(T) % LENGTH > 1).to(device),
                seq_ids_T=seq_ids(device),
                num_seqs=S,
                values_T=values,
                bootstrap_values_S=values[:S],
                truncated_S=torch.tensor([False, True, False, False], device=device),
                token_rewards_T=torch.zeros(T, device=device),
                greedy_rewards_S=rewards[-S:],
                episodes_S=torch.tensor([0, 1, 0, 1], device=device),
                roles_S=torch.zeros(S, dtype=torch.int64, device=device),
            )
        )
        reported.append(output.advantages_T.cpu())
    torch.testing.assert_close(reported[1], reported[0])


@pytest.mark.parametrize("name", known("value_loss"))
def test_a_loss_of_values_gives_the_cpus_without_a_wait(name: str) -> None:
    reported, objective = [], ValueObjective(Choice(name), Choice("token_mean"), found)
    for device in (CPU, DEVICE):
        drawn = columns(device)
        values = next(drawn).requires_grad_()
        mask = (torch.arange(T) % LENGTH > 1).to(device)
        inputs, ids = ValueLossInputs(values, next(drawn), next(drawn), mask), seq_ids(device)
        with pretended.watched() as watch:
            loss, _ = objective(inputs, LossTokens(mask, ids, S), 3.0)
            loss.backward()  # type: ignore[no-untyped-call]
        assert not watch.waits, watch.lines()
        assert values.grad is not None
        reported.append(values.grad.cpu())
    torch.testing.assert_close(reported[1], reported[0])


@pytest.mark.parametrize("name", ["cross_entropy", "bradley_terry", "dpo", "ipo", "kto", "muon"])
def test_supervised_training_has_the_cpus_numbers_and_waits_as_often_with_many_micro_batches(
    tmp_path: Path, name: str
) -> None:
    (reward_model() if name == "bradley_terry" else policy()).save_pretrained(tmp_path)
    config = SFTConfig(loss=ChoiceConfig("cross_entropy" if name == "muon" else name))
    config.optimizer = OptimizerName.muon if name == "muon" else OptimizerName.adamw
    config.model.path = str(tmp_path)
    reported, waits = {}, []
    for device in (CPU, DEVICE):
        trained: Any = make_objective(config, engine_settings(config, tmp_path, 10), RankPosition(), device)
        for budget in (4096, 4096, 8):
            trained.engine._budget = budget
            with pretended.watched() as watch:
                measures = trained.compute_gradients(BATCH)
                reported[device, len(waits) % 3] = [*measures, *trained.measure(BATCH)]
            waits.append(watch.waits)
            trained.engine.step(1e-3)
    # torch's Muon rounds its momentum to bfloat16; one element that rounds the other way moves a step by 2 %.
    within = (1e-5, 1e-3, 5e-3) if name == "muon" else (1e-5, 1e-5, 1e-5)
    for number in range(3):
        assert [x for x in reported[DEVICE, number] if x is not None] == pytest.approx(
            [x for x in reported[CPU, number] if x is not None], abs=within[number]
        )
    more = waits[5] - waits[4]
    assert not more, f"waits that come with micro-batches:\n{pretended.Watch(waits=more).lines()}"


def test_the_encoder_of_frames_has_the_cpus_embeddings_and_waits_with_its_batches() -> None:
    draw = np.random.default_rng(0)
    clips = [[Picture.from_array(draw.integers(0, 256, (24, 24, 3), np.uint8)) for _ in range(8)] for _ in range(4)]
    expected = VJEPA2Encoder(folder=str(ENCODER), batch=2)(clips)
    encoder = VJEPA2Encoder(folder=str(ENCODER), device=str(DEVICE), batch=2)
    with pretended.watched() as watch:
        np.testing.assert_allclose(encoder(clips), expected, atol=1e-5)
    assert sum(watch.waits.values()) <= 2 * 2, watch.lines()
