"""The simulator of benchmarks/simulate.py: its physics, and that the control plane's real code runs in it."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from simulate import simulated
from simulator.clock import Deadlock
from simulator.clock import run as run_virtual
from simulator.devices import H100, QWEN_7B, engine_model
from simulator.scenarios import Cell
from simulator.servers import Engine
from simulator.setup import EngineModel, Faults, LogNormal, Setup, TrainerModel
from simulator.simulation import Simulation, simulate

from asyncrl.inference.messages import (
    ContinueRequest,
    GenerateRequest,
    PauseMode,
    PauseRequest,
    UpdateWeightsRequest,
)
from asyncrl.manager.messages import RunBegin
from asyncrl.manager.settings import UpdateMode
from asyncrl.master.settings import OnStale

MODEL = EngineModel(
    step_s=0.01,
    sequence_s=0.001,
    context_s=1e-5,
    prefill_s=0.002,
    prefill_token_s=1e-4,
    max_running=8,
    kv_tokens=10_000,
    update_s=0.5,
)
SETUP = Setup(
    servers=3,
    engine=MODEL,
    trainer=TrainerModel(token_s=1e-4, fixed_s=0.3, publish_s=0.1),
    devices=(3, 3),
    lengths=LogNormal(40, 0.7, 200),
    eta=2,
    batch=4,
    group=3,
    max_new_tokens=200,
    prompt_tokens=10,
    workers=2,
    steps=5,
    warm_up=1,
    health_interval_s=1.0,
)


class _Fixed:
    """Answers with as many tokens as their seed says."""

    def tokens(self, prompt: int, seed: int) -> int:
        return seed


FIXED: Any = _Fixed()


def _request(*lengths: int, prompt: tuple[int, ...] = (1, 2, 3, 4), most: int = 1_000) -> GenerateRequest:
    return GenerateRequest(
        rid=[f"{prompt[0]};{number};0;" for number in range(len(lengths))],
        input_ids=[prompt] * len(lengths),
        sampling_params=[{"max_new_tokens": most, "sampling_seed": length} for length in lengths],
    )


def _seconds(model: EngineModel, prompt: int, lengths: list[int], prefilled: int) -> float:
    """Token by token, what the engine has to find without looking at any."""
    at = len(lengths) * model.prefill_s + model.prefill_token_s * prefilled
    for step in range(max(lengths)):
        running = sum(length > step for length in lengths)
        at += model.decode_step_s(running, running * (prompt + step + 0.5))  # of context the mean over the step
    return at


def test_time_passes_only_where_everything_waits() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times = [loop.time()]
        await asyncio.gather(asyncio.sleep(3600.0), asyncio.sleep(7200.0))
        times.append(loop.time())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await asyncio.Event().wait()
        return [*times, loop.time()]

    assert run_virtual(main()) == pytest.approx([0.0, 7200.0, 7201.5], abs=1e-3)


def test_a_deadlock_names_who_waits() -> None:
    async def waits_for_nobody() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="waits_for_nobody"):
        run_virtual(waits_for_nobody())


def test_answers_take_as_long_as_token_by_token() -> None:
    lengths = [30, 7, 80, 80]

    async def main() -> float:
        engine = Engine(MODEL, FIXED)
        replies = await engine.answer("/generate", _request(*lengths))
        assert [len(reply["output_ids"]) for reply in replies] == lengths
        assert {reply["meta_info"]["finish_reason"]["type"] for reply in replies} == {"stop"}
        return asyncio.get_running_loop().time()

    # the prompt of four tokens is prefilled once and then cached
    assert run_virtual(main()) == pytest.approx(_seconds(MODEL, 4, lengths, prefilled=4), rel=1e-3)


def test_no_more_run_than_may_and_the_rest_queues() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        engine = Engine(replace(MODEL, max_running=2, context_s=0.0), FIXED)
        first = asyncio.create_task(engine.answer("/generate", _request(50, 50)))
        await asyncio.sleep(0)
        await engine.answer("/generate", _request(50, 50, prompt=(9,)))
        assert first.done()
        return loop.time(), engine.counts.running_s

    took, running_s = run_virtual(main())
    assert took == pytest.approx(100 * 0.012 + 4 * 0.002 + 5e-4, rel=1e-6)
    assert running_s == pytest.approx(2 * took, rel=1e-6)


def test_memory_that_is_full_sends_the_youngest_back_and_no_token_is_lost() -> None:
    async def main() -> Engine:
        engine = Engine(replace(MODEL, kv_tokens=150), FIXED)
        replies = await engine.answer("/generate", _request(90, 90, 90))
        assert [len(reply["output_ids"]) for reply in replies] == [90, 90, 90]
        return engine

    engine = run_virtual(main())
    assert engine.counts.retracted > 0
    assert engine.counts.generated == pytest.approx(270)


@pytest.mark.parametrize("mode", PauseMode)
def test_an_update_does_to_what_runs_what_its_pause_says(mode: PauseMode) -> None:
    async def main() -> None:
        engine = Engine(MODEL, FIXED)
        running = asyncio.create_task(engine.answer("/generate", _request(100, 100)))
        await asyncio.sleep(0.5)
        await engine.answer("/pause_generation", PauseRequest(mode))
        await asyncio.sleep(0)
        await engine.answer(
            "/update_weights_from_disk", UpdateWeightsRequest("v1", "1", flush_cache=mode != PauseMode.in_place)
        )
        await engine.answer("/continue_generation", ContinueRequest())
        prefilled = engine.counts.prefilled
        replies = await running
        for reply in replies:
            spans, tokens = reply["meta_info"]["weight_versions"], len(reply["output_ids"])
            assert spans[-1]["end"] == tokens
            if mode == PauseMode.abort:
                assert reply["meta_info"]["finish_reason"]["type"] == "abort"
                assert 0 < tokens < 100
                assert [span["version"] for span in spans] == ["0"]
            else:
                assert tokens == 100
                assert [span["version"] for span in spans] == ["0", "1"]
        again = engine.counts.interrupted
        assert (again > 0) == (mode != PauseMode.in_place)
        assert (engine.counts.prefilled > prefilled or mode == PauseMode.retract) == (mode == PauseMode.retract)

    run_virtual(main())


def test_coarse_units_are_as_fast_as_tokens() -> None:
    async def main(model: EngineModel, unit: int) -> float:
        engine = Engine(model, FIXED)
        await engine.answer("/generate", _request(640 // unit, 960 // unit, prompt=tuple(range(640 // unit))))
        return asyncio.get_running_loop().time()

    model = engine_model(QWEN_7B, H100, 2)
    fine = run_virtual(main(model, 1))
    assert run_virtual(main(model.coarse(64), 64)) == pytest.approx(fine, rel=0.01)


def test_lengths_are_their_seeds_alone_and_long_tailed() -> None:
    lengths = LogNormal(1_000, 1.0, 8_000)
    drawn = [lengths.tokens(seed // 8, seed) for seed in range(4_000)]
    assert drawn == [lengths.tokens(seed // 8, seed) for seed in range(4_000)]
    assert max(drawn) == 8_000
    assert sorted(drawn)[2_000] == pytest.approx(1_000, rel=0.1)


def test_a_whole_run_is_accounted_for() -> None:
    found = simulate(SETUP)
    assert found.faults == []
    assert len(found.steps) == 5
    assert found.staleness_max <= SETUP.eta


def test_a_run_is_the_same_every_time() -> None:
    faults = Faults(death_every_s=40.0, restart_s=15.0)
    first, second = (simulate(replace(SETUP, faults=faults, update_fraction=0.4)) for _ in range(2))
    assert first.steps == second.steps
    assert first.staleness == second.staleness


def test_a_synchronous_run_generates_and_trains_in_turns() -> None:
    found = simulate(replace(SETUP, eta=0, colocated=True))
    assert found.faults == []
    assert found.staleness_max == 0
    trained = 1.0 - found.training_idle
    generated = 1.0 - found.generation_idle
    assert generated + trained <= 1.0
    assert found.wait_s + trained * found.step_s == pytest.approx(found.step_s, rel=0.02)


@pytest.mark.parametrize("on_stale", [OnStale.drop, OnStale.wait])
def test_colocated_servers_and_the_trainer_take_turns(on_stale: OnStale) -> None:
    """Where all servers are colocated servers, they generate and the trainer trains at different times; a switch costs
    time.
    """
    setup = replace(SETUP, colocated_servers=3, on_stale=on_stale, engine=replace(MODEL, switch_s=0.2))
    found = simulate(setup)
    assert found.faults == []
    assert found.staleness_max <= setup.eta
    trained, generated = 1.0 - found.training_idle, 1.0 - found.generation_idle
    assert 0.0 < generated + trained <= 1.0
    assert found.step_s < simulate(replace(setup, engine=replace(MODEL, switch_s=2.0))).step_s


def test_woken_servers_make_steps_shorter() -> None:
    """The trainer is idle most of the time; a switch that costs too much is not made."""
    alone = replace(SETUP, servers=2, steps=48, warm_up=4)  # of 12 steps the mean is within a tenth alone
    apart = simulate(alone)
    beside = replace(alone, servers=3, colocated_servers=1, devices=(3, 1), engine=replace(MODEL, switch_s=0.05))
    helped, dear = (simulate(replace(beside, engine=replace(MODEL, switch_s=each))) for each in (0.05, 20.0))
    assert apart.faults == helped.faults == dear.faults == []
    assert helped.step_s < 0.96 * apart.step_s
    assert dear.step_s < 2 * apart.step_s, "20 seconds are spent in the first steps, which measure them, and not again"


@pytest.mark.parametrize("mode", UpdateMode)
def test_servers_that_die_and_fall_silent_cost_no_rollout(mode: UpdateMode) -> None:
    faults = Faults(death_every_s=40.0, restart_s=15.0, silence_every_s=60.0, silence_s=8.0)
    found = simulate(replace(SETUP, update_mode=mode, faults=faults, steps=12, request_timeout_s=30.0))
    assert found.faults == []
    assert found.deaths > 0


def test_a_fleet_that_is_well_costs_its_manager_little() -> None:
    """A health check that finds what was known tells the router nothing: with n servers that would be n² a second."""

    async def main() -> int:
        simulation = Simulation(replace(SETUP, servers=32))
        simulation.fleet.start()
        simulation.manager.service.begin(RunBegin())
        running = asyncio.create_task(simulation.manager.runner.run())
        await asyncio.sleep(0.5)
        reported, update = 0, simulation.manager.service.router.update

        def counted(index: int, url: str, version: int, routable: bool) -> None:
            nonlocal reported
            reported += 1
            update(index, url, version, routable)

        simulation.manager.service.router.update = counted  # type: ignore[method-assign]
        await asyncio.sleep(10.0)
        running.cancel()
        return reported

    assert run_virtual(main()) <= 4 * 32


def test_interrupted_answers_are_spread_over_all_servers_again() -> None:
    """Not given to the first one that is back from the update."""
    found = simulate(replace(SETUP, servers=8, eta=0, colocated=True, batch=8, group=8, steps=4))
    assert found.faults == []
    first, *later = found.steps
    assert max(later) < 2 * first


def test_a_table_has_each_run_beside_its_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    setups = {eta: replace(SETUP, eta=eta, colocated=not eta, steps=4) for eta in (0, 2)}
    simulated([Cell("3 devices: η", f"η = {eta}", setup, baseline=not eta) for eta, setup in setups.items()])
    heads, _, *rows = (line.split(" | ") for line in capsys.readouterr().out.splitlines() if line)
    assert [row[0] for row in rows] == ["| η = 0", "| η = 2"]
    assert {len(row) for row in rows} == {len(heads)}
    before, after = (simulate(setup) for setup in setups.values())
    assert [row[2] for row in rows] == ["", f"{after.trained_per_s / before.trained_per_s:.2f}"]
    assert after.staleness.total() == pytest.approx(3 * 4 * 3 * 40, rel=0.5)  # of the steps that are measured
