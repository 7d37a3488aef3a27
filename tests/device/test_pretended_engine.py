"""The embedded engine runs on a second device: it writes the CPU's tokens, and waits a fixed number of times for each.

The device is pretended (`pretended_device`). Decoding is recorded on CPUs only, so that is not tried here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.engine_io import GenerationOutput
from asyncrl.inference.messages import MemoryTag, PauseMode
from tests.device import pretended_device as pretended
from tests.device.pretended_device import DEVICE
from tests.device_cases import ENGINE_CASES, EngineCase, Folders, engine_of, jobs_of, model_of
from tests.engine_steps import drain

CPU = torch.device("cpu")
ROUNDING = 1e-5
UNTIL_PARTED, WATCHED = 8, 4
"""Steps: until samples have parted, which share rows before and are looked at; and those that are counted."""


def begun(engine: GenerationEngine, case: EngineCase, folders: Folders, new_tokens: int = 20) -> pretended.Watch:
    """Submit the jobs of `case`, whose outputs are in `engine.reported`; count some steps."""
    for job in jobs_of(case, folders, new_tokens):
        engine.submit(job).add_done_callback(lambda future: reported(engine).extend(future.result(timeout=0)))
    for _ in range(UNTIL_PARTED):
        engine.step()
    with pretended.watched() as watch:
        for _ in range(WATCHED):
            engine.step()
    return watch


def reported(engine: GenerationEngine) -> list[GenerationOutput]:
    """The outputs of `engine` so far."""
    found: list[GenerationOutput] = vars(engine).setdefault("told", [])
    return found


def _order(output: GenerationOutput) -> tuple[str, int]:
    return output.rid, len(output.output_ids)


def assert_same(found: GenerationEngine, expected: GenerationEngine) -> None:
    """Both have told the same, up to rounding."""
    mine, theirs = (sorted(reported(each), key=_order) for each in (found, expected))
    assert [each.output_ids for each in mine] == [each.output_ids for each in theirs]
    for ours, other in zip(mine, theirs, strict=True):
        assert ours.logprobs == pytest.approx(other.logprobs, abs=ROUNDING)
        if other.prompt_logprobs is not None:
            assert ours.prompt_logprobs is not None
            assert ours.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=ROUNDING)
        assert (ours.routing is None) == (other.routing is None)
        assert ours.routing is None or (ours.routing == other.routing).all()


@pytest.mark.parametrize("name", ENGINE_CASES)
def test_the_embedded_engine_on_a_device_writes_the_cpus_tokens_and_waits_for_each_as_often_as_told(
    folders: Folders, name: str
) -> None:
    case = ENGINE_CASES[name]
    engines = {device: engine_of(case, device, folders) for device in (CPU, DEVICE)}
    for engine in engines.values():
        watch = begun(engine, case, folders)
        drain(engine)
    if case.dtype == torch.float32:  # in 16 bits a sample may go another way
        assert_same(engines[DEVICE], engines[CPU])
    assert len(reported(engines[DEVICE])) == 12
    assert sum(watch.waits.values()) <= case.waits * WATCHED, watch.lines()


def test_a_token_of_the_embedded_engine_takes_thirty_operators_a_layer(folders: Folders) -> None:
    """On a GPU each is a launch: the figure is in docs/gpu.md."""
    found = []
    for layers in (2, 4):
        engine = engine_of(EngineCase(), DEVICE, folders, num_hidden_layers=layers)
        found.append(sum(begun(engine, EngineCase(), folders).operators.values()))
    assert (found[1] - found[0]) / 2 / WATCHED <= 30


UPDATES = [
    *((mode, "plain") for mode in PauseMode),
    (PauseMode.retract, "experts, recorded"),
    (PauseMode.in_place, "scan"),
    (PauseMode.in_place, "pictures"),
]


@pytest.mark.parametrize(("mode", "name"), UPDATES)
def test_an_update_in_the_middle_of_samples_leads_to_the_cpus_tokens(
    folders: Folders, tmp_path: Path, mode: PauseMode, name: str
) -> None:
    case = ENGINE_CASES[name]
    newer = engine_of(case, CPU, folders).model
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.mul_(1.1)
    newer.save_pretrained(tmp_path)
    engines = {device: engine_of(case, device, folders) for device in (CPU, DEVICE)}
    for engine in engines.values():
        begun(engine, case, folders)
        engine.pause(mode)
        engine.step()
        engine.update_weights(str(tmp_path), "v1", flush_cache=mode != PauseMode.in_place)
        engine.step()
        engine.resume()
        for job in jobs_of(case, folders) if mode == PauseMode.abort else ():
            engine.submit(job).add_done_callback(
                lambda future, to=engine: reported(to).extend(future.result(timeout=0))
            )
        drain(engine)
        assert {each.weight_version for each in reported(engine)[-12:]} == {"v1"}
    assert_same(engines[DEVICE], engines[CPU])


def test_a_colocated_server_gives_its_memory_up_and_serves_again(folders: Folders, tmp_path: Path) -> None:
    model_of().save_pretrained(str(tmp_path))
    case = EngineCase(engine={"saves_memory": True})
    engine, expected = engine_of(case, DEVICE, folders), engine_of(EngineCase(), CPU, folders)
    begun(engine, case, folders)
    engine.pause(PauseMode.abort)
    engine.step()
    reported(engine).clear()
    freed = engine.release_memory([MemoryTag.weights, MemoryTag.kv_cache])
    engine.step()
    held = [parameter.untyped_storage().nbytes() for parameter in engine.model.parameters()]
    assert freed.result(timeout=0) > 4 * sum(parameter.numel() for parameter in model_of().parameters())
    assert not any(held)
    engine.resume_memory([MemoryTag.weights, MemoryTag.kv_cache])
    engine.step()
    engine.update_weights(str(tmp_path), "v1")
    engine.step()
    engine.resume()
    for each in (engine, expected):
        begun(each, case, folders)
        drain(each)
    assert_same(engine, expected)
