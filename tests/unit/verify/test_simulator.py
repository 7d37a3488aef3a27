"""The simulator of benchmarks/simulate.py: its physics, and that the control plane's real code runs in it."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from simulator.clock import Deadlock
from simulator.clock import run as run_virtual
from simulator.devices import H100, QWEN_7B, engine_model
from simulator.fit import fit_rollouts
from simulator.host.cores import FIRST, LATER, Cores, Process
from simulator.host.processes import WAIT_LOOK_S, Announcements
from simulator.real import B, RealRun, as_json, from_json
from simulator.report import Kept, tables
from simulator.scenarios import Cell
from simulator.servers.engine_model import EngineModel
from simulator.servers.faults import Faults
from simulator.servers.generation_server import Engine
from simulator.servers.lengths import Answer, LogNormal, Recorded, parting
from simulator.setup import Host, Setup
from simulator.simulation import Simulation, simulate
from simulator.trainer import TrainerModel

from asyncrl.inference.messages import (
    ContinueRequest,
    GenerateRequest,
    PauseMode,
    PauseRequest,
    UpdateWeightsRequest,
)
from asyncrl.manager.fleet.servers import Target
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
    name="small",
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
    """Answers with as many tokens as their seed says, of which so many are the group's as `shared` says by member."""

    def __init__(self, *shared: int) -> None:
        self._shared = shared

    def answer(self, prompt: int, seed: int, member: int) -> Answer:
        return Answer(seed, self._shared[member], not member) if self._shared else Answer(seed)

    def coarse(self, grain: int) -> _Fixed:
        raise NotImplementedError


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
        engine = Engine(MODEL, _Fixed())
        replies = await engine.answer("/generate", _request(*lengths))
        assert [len(reply["output_ids"]) for reply in replies] == lengths
        assert {reply["meta_info"]["finish_reason"]["type"] for reply in replies} == {"stop"}
        return asyncio.get_running_loop().time()

    # the prompt of four tokens is prefilled once and then cached
    assert run_virtual(main()) == pytest.approx(_seconds(MODEL, 4, lengths, prefilled=4), rel=1e-3)


def test_what_samples_have_alike_is_computed_once() -> None:
    """As if token by token the rows were counted: samples that have not parted are one."""
    lengths, shared, model = [30, 40, 25, 25], [0, 10, 25, 0], replace(MODEL, sequence_s=2e-4, row_s=1e-3)

    async def main() -> tuple[float, list[list[int]]]:
        engine = Engine(model, _Fixed(*shared))
        replies = await engine.answer("/generate", _request(*lengths))
        return asyncio.get_running_loop().time(), [reply["output_ids"] for reply in replies]

    at, tokens = run_virtual(main())
    assert tokens[0][:10] == tokens[1][:10] == tokens[2][:10]
    assert tokens[1][10] != tokens[0][10]
    assert parting(tokens) == list(zip(lengths, shared, strict=True))
    expected = 4 * model.prefill_s + 4 * model.prefill_token_s
    for step in range(max(lengths)):
        running = sum(length > step for length in lengths)
        rows = sum(own_from <= step < length for length, own_from in zip(lengths, shared, strict=True))
        expected += model.decode_step_s(running, rows * (4 + step + 0.5), rows)
    assert at == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("mode", [PauseMode.abort, PauseMode.retract])
def test_what_samples_have_alike_is_prefilled_once_after_an_interruption(mode: PauseMode) -> None:
    async def main() -> float:
        engine = Engine(MODEL, _Fixed(0, 60, 100))
        running = asyncio.create_task(engine.answer("/generate", _request(100, 100, 100)))
        await asyncio.sleep(0.5)  # some 40 tokens: none has parted
        await engine.answer("/pause_generation", PauseRequest(mode))
        await asyncio.sleep(0)
        await engine.answer("/update_weights_from_disk", UpdateWeightsRequest("v1", "1"))
        before = engine.counts.prefilled
        await engine.answer("/continue_generation", ContinueRequest())
        if mode == PauseMode.abort:
            partial = [reply["output_ids"] for reply in await running]
            assert 0 < len(partial[0]) < 60
            assert partial[0] == partial[1] == partial[2]
            again = _request(100, 100, 100)
            params = [each | {"custom_params": {"seed_offset": len(partial[0])}} for each in again.sampling_params]  # type: ignore[union-attr]
            inputs = [[1, 2, 3, 4, *partial[0]]] * 3
            replies = await engine.answer(
                "/generate", GenerateRequest(rid=again.rid, input_ids=inputs, sampling_params=params)
            )
            tokens = [partial[0] + reply["output_ids"] for reply in replies]
        else:
            tokens = [reply["output_ids"] for reply in await running]
        assert parting(tokens) == [(100, 0), (100, 60), (100, 100)]
        return engine.counts.prefilled - before

    assert 4 < run_virtual(main()) < 4 + 60


def test_processes_of_one_weight_share_the_cores_evenly() -> None:
    async def main() -> list[float]:
        loop, cores, times = asyncio.get_running_loop(), Cores(2), []

        async def job(after: float, seconds: float) -> None:
            await asyncio.sleep(after)
            await cores.work(seconds)
            times.append(loop.time())

        await asyncio.gather(job(0, 4), job(0, 4), job(1, 2))
        worker = Process(cores)
        await asyncio.gather(worker.work(1), worker.work(1))
        return [*times, loop.time()]

    # from 1 on three have two thirds of a core each: the last has its 2 s at 4, when the others lack 1 s
    assert run_virtual(main()) == pytest.approx([4.0, 5.0, 5.0, 7.0])


def test_training_comes_first_on_the_cores_and_the_rest_shares_what_it_leaves() -> None:
    async def main() -> list[float]:
        loop, cores, times = asyncio.get_running_loop(), Cores(2), {}

        async def job(name: str, seconds: float, weight: float) -> None:
            await cores.work(seconds, weight)
            times[name] = loop.time()

        await asyncio.gather(job("first", 6, FIRST), *(job(str(number), 2, LATER) for number in range(3)))
        return [times[name] for name in ("first", "0", "1", "2")]

    assert run_virtual(main()) == pytest.approx([6.0, 6.0, 6.0, 6.0])  # three have one core, training the other


def test_threads_of_one_process_take_each_others_time() -> None:
    async def main() -> list[float]:
        loop, rank = asyncio.get_running_loop(), Process(Cores(2))
        training = asyncio.create_task(rank.work(3))
        await asyncio.sleep(1)
        await rank.cut_in(0.5)
        cut_in = loop.time()
        await training
        trained = loop.time()
        await rank.cut_in(0.5)
        return [cut_in, trained, loop.time(), rank.used_s]

    assert run_virtual(main()) == pytest.approx([1.5, 3.5, 4.0, 4.0])


def test_a_version_is_heard_of_at_the_managers_next_look() -> None:
    async def main() -> list[float]:
        loop, heard = asyncio.get_running_loop(), []
        announcements = Announcements(lambda _: heard.append(loop.time()), polled=True)
        for at in (0.010, 0.13, 1.05):
            await asyncio.sleep(at - loop.time())
            announcements.announce(Target(1, "v1"))
            await asyncio.sleep(WAIT_LOOK_S)
        return heard

    assert run_virtual(main()) == pytest.approx([0.1, 0.2, 1.1], abs=1e-6)


def test_an_engine_slows_down_while_others_compute_on_its_cores() -> None:
    async def main(others: int) -> float:
        cores = Cores(2)
        engine = Engine(MODEL, _Fixed(), cores=cores)
        background = [asyncio.create_task(cores.work(1e6)) for _ in range(others)]
        await asyncio.sleep(0)
        await engine.answer("/generate", _request(50, 30))
        for each in background:
            each.cancel()
        return asyncio.get_running_loop().time()

    alone, with_one, with_three = (run_virtual(main(others)) for others in (0, 1, 3))
    assert with_one == pytest.approx(alone)
    assert with_three == pytest.approx(2 * alone, rel=1e-6)


def test_what_queues_starts_together_once_enough_has_changed() -> None:
    """As the embedded engine does it: not while it prefills, and where little has changed after some steps."""
    model = replace(MODEL, max_running=64, context_s=0.0, admission_s=0.05, change_share=4, idle_steps=40)

    async def main(late: int) -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        engine = Engine(model, _Fixed())
        first = asyncio.create_task(engine.answer("/generate", _request(*[100] * 8)))
        await asyncio.sleep(0.5)
        await engine.answer("/generate", _request(*[1] * late, prompt=(9,)))
        took = loop.time() - 0.5
        await first
        return took, loop.time()

    prefill = 2 * (model.prefill_s + 1e-4) + model.admission_s
    (at_once, _), (waited, _) = run_virtual(main(2)), run_virtual(main(1))
    assert at_once == pytest.approx(prefill + model.decode_step_s(10, 0.0), rel=0.05)
    assert waited > at_once  # one of eight is fewer than a quarter

    async def in_turn() -> float:
        engine = Engine(model, _Fixed())
        calls = [asyncio.create_task(engine.answer("/generate", _request(5, prompt=(number,)))) for number in range(6)]
        await asyncio.gather(*calls)
        return asyncio.get_running_loop().time()

    apart = 6 * (model.prefill_s + 1e-4 + model.admission_s)
    assert run_virtual(in_turn()) < apart  # the first alone, the five that came meanwhile together


def test_no_more_run_than_may_and_the_rest_queues() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        engine = Engine(replace(MODEL, max_running=2, context_s=0.0), _Fixed())
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
        engine = Engine(replace(MODEL, kv_tokens=150), _Fixed())
        replies = await engine.answer("/generate", _request(90, 90, 90))
        assert [len(reply["output_ids"]) for reply in replies] == [90, 90, 90]
        return engine

    engine = run_virtual(main())
    assert engine.counts.retracted > 0
    assert engine.counts.generated == pytest.approx(270)


@pytest.mark.parametrize("mode", PauseMode)
def test_an_update_does_to_what_runs_what_its_pause_says(mode: PauseMode) -> None:
    async def main() -> None:
        engine = Engine(MODEL, _Fixed())
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
        engine = Engine(model, _Fixed())
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


def test_recorded_groups_are_had_whole_and_part_where_they_parted() -> None:
    assert parting([[1, 2, 3], [1, 2, 4, 5], [9], [1, 2, 4]]) == [(3, 0), (4, 2), (1, 0), (3, 3)]
    recorded = Recorded((((3, 0, 1.0), (4, 2, 0.0)), ((7, 0, 1.0), (7, 7, 1.0))), times=2.0)
    drawn = {tuple(recorded.answer(prompt, 5, member) for member in range(3)) for prompt in range(40)}
    first = (Answer(6, 0, True), Answer(8, 4, False), Answer(6, 0, True))
    assert drawn == {first, (Answer(14, 0, True), Answer(14, 14, False), Answer(14, 0, True))}
    assert recorded.mean == 2 * 21 / 4
    assert recorded.coarse(2).answer(0, 0, 0).tokens * 2 in {6, 14}
    assert replace(recorded, apart=True).answer(0, 0, 1).own_from == 0


def test_recorded_groups_are_had_in_the_data_order(tmp_path: Path) -> None:
    """At a place whose group is not known is the one before, beyond the last they are had backwards."""
    known = {0: [(3, 0, 1.0), (4, 2, 0.0)], 2: [(7, 0, 1.0), (7, 7, 1.0)]}
    recorded = Recorded.of_places(known)
    assert [recorded.answer(order, 9, 1).tokens for order in range(6)] == [4, 4, 7, 7, 4, 4]
    assert [recorded.is_trained(order) for order in range(4)] == [True, True, False, False]  # rewards that are alike
    recorded.save(tmp_path / "groups.json")
    assert replace(Recorded.of_file(tmp_path / "groups.json"), in_order=True) == recorded


def test_a_run_has_the_groups_of_another_in_their_places_and_trains_those_whose_rewards_differ() -> None:
    short, long = ((10, 0, 0.0), (12, 3, 1.0), (11, 0, 1.0)), ((150, 0, 1.0), (150, 2, 1.0), (160, 0, 1.0))
    lengths = Recorded((short,) * 12 + (long,) * 8, in_order=True)
    found = simulate(replace(SETUP, eta=0, lengths=lengths, in_order=True, warm_up=0, shares_prefixes=True))
    assert found.faults == []
    assert max(found.steps[:3]) < min(found.steps[3:])  # twelve prompts are three steps
    mixed = replace(lengths, groups=tuple((*group[:2], (*group[2][:2], 0.0)) for group in lengths.groups))
    trained = simulate(replace(SETUP, eta=0, lengths=mixed, in_order=True, warm_up=0, shares_prefixes=True))
    tokens = 4 * (10 + 150 + 148 + 160)  # of a step of long groups, which now have a reward
    assert trained.steps[4] - found.steps[4] == pytest.approx(SETUP.trainer.token_s * tokens, rel=0.01)


def test_what_a_rollout_costs_is_told_from_what_its_tokens_cost() -> None:
    rollouts, used_s = [], 3.0
    for number in range(8 * B):
        tokens = 100 + 40 * (number // B % 3) + number % 7
        used_s += 5e-4 + 4e-6 * tokens
        rollouts.append((used_s, tokens))
    assert fit_rollouts(rollouts) == pytest.approx((5e-4, 4e-6), rel=1e-3)


def test_a_real_run_is_read_as_it_was_kept() -> None:
    row = {"step": 1, "time/step_s": 0.5}
    real = RealRun([row] * 10, {"master_worker": 0.1}, 0.01, {3: [(4, 0, 1.0), (5, 2, 0.0)]}, [(0.2, 9)])
    kept = from_json(json.loads(json.dumps(as_json(real))))
    assert kept == real
    assert kept.mean("step") == 0.5


def test_a_whole_run_is_accounted_for() -> None:
    found = simulate(SETUP)
    assert found.faults == []
    assert len(found.steps) == 5
    assert found.staleness_max <= SETUP.eta
    assert 0.0 <= found.idle <= 1.0


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
def test_guests_and_the_trainer_take_turns(on_stale: OnStale) -> None:
    """Where all servers are guests, they generate and the trainer trains at different times; a switch costs time."""
    setup = replace(SETUP, guests=3, on_stale=on_stale, engine=replace(MODEL, switch_s=0.2))
    found = simulate(setup)
    assert found.faults == []
    assert found.staleness_max <= setup.eta
    trained, generated = 1.0 - found.training_idle, 1.0 - found.generation_idle
    assert 0.0 < generated + trained <= 1.0
    assert found.step_s < simulate(replace(setup, engine=replace(MODEL, switch_s=2.0))).step_s


def test_lent_devices_make_steps_shorter() -> None:
    """The trainer is idle most of the time; a switch that costs too much is not made."""
    alone = replace(SETUP, servers=2, steps=48, warm_up=4)  # of 12 steps the mean is within a tenth alone
    apart = simulate(alone)
    lent = replace(alone, servers=3, guests=1, devices=(3, 1), engine=replace(MODEL, switch_s=0.05))
    helped, dear = (simulate(replace(lent, engine=replace(MODEL, switch_s=each))) for each in (0.05, 20.0))
    assert apart.faults == helped.faults == dear.faults == []
    assert helped.step_s < 0.96 * apart.step_s
    assert dear.step_s < 2 * apart.step_s, "20 seconds are spent in the first steps, which measure them, and not again"


def test_a_run_on_one_host_is_slower_the_fewer_its_cores() -> None:
    parts = ("call_s", "rollout_s", "rollout_token_s", "receive_s", "manager_s", "master_s", "check_s")
    host = Host(cores=64, **dict.fromkeys(parts, 0.001))
    setup = replace(
        SETUP, steps=8, shares_prefixes=True, lengths=Recorded((((40, 0, 0.0), (30, 10, 0.0), (50, 40, 1.0)),))
    )
    apart, many, few = (simulate(replace(setup, host=each)) for each in (None, host, replace(host, cores=2)))
    assert apart.faults == many.faults == few.faults == []
    assert few.staleness_max <= SETUP.eta
    assert many.step_s < few.step_s


def test_what_is_written_as_json_and_read_again_goes_the_same_way() -> None:
    plain, encoded = (simulate(replace(SETUP, steps=3, encode=encode)) for encode in (False, True))
    assert plain.faults == encoded.faults == []
    assert len(encoded.steps) == len(plain.steps)


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
        told, update = 0, simulation.manager.service.router.update

        def counted(index: int, url: str, version: int, routable: bool) -> None:
            nonlocal told
            told += 1
            update(index, url, version, routable)

        simulation.manager.service.router.update = counted  # type: ignore[method-assign]
        await asyncio.sleep(10.0)
        running.cancel()
        return told

    assert run_virtual(main()) <= 4 * 32


def test_interrupted_answers_are_spread_over_all_servers_again() -> None:
    """Not given to the first one that is back from the update."""
    found = simulate(replace(SETUP, servers=8, eta=0, colocated=True, batch=8, group=8, steps=4))
    assert found.faults == []
    first, *later = found.steps
    assert max(later) < 2 * first


def test_finished_rows_are_kept_by_what_they_are_of_and_tables_are_made_of_them(tmp_path: Path) -> None:
    setups = {eta: replace(SETUP, eta=eta, colocated=not eta, steps=4) for eta in (0, 2)}
    kept = Kept(tmp_path / "rows.json")
    for setup in setups.values():
        kept.add(setup, simulate(setup))
    kept = Kept(tmp_path / "rows.json")
    assert kept.has(replace(setups[2], name="another name"))
    assert not kept.has(replace(setups[2], seed=2))
    cells = [Cell("3 devices: η", f"η = {eta}", setup, baseline=not eta) for eta, setup in setups.items()]
    text = tables(cells, kept)
    found = kept.get(setups[2])
    assert f"{found.trained_per_s / kept.get(setups[0]).trained_per_s:.2f}" in text
    *_, ages = (line for line in text.splitlines() if line.startswith("| η = 2 |") and line.count("%") == 3)
    shares = [int(share.strip(" %")) for share in ages.split("|")[2:-1]]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert found.staleness.total() == pytest.approx(3 * 4 * 3 * 40, rel=0.5)  # of the steps that are measured
