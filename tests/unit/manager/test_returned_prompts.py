"""A dropped prompt reaches its worker at least once, and is run again exactly once per return."""

from __future__ import annotations

from asyncrl.manager.leases import WorkerLeases
from asyncrl.manager.returned_prompts import ReturnedPrompts


def pending(prompts: ReturnedPrompts, worker: str = "w") -> list[str]:
    return [prompt.prompt_id for prompt in prompts.pending(worker)]


def test_a_returned_prompt_is_told_until_it_is_acknowledged() -> None:
    prompts = ReturnedPrompts()
    prompts.give_back("w", "a", 3)
    prompts.give_back("w", "b", 1)
    assert [(prompt.seq, prompt.order) for prompt in prompts.pending("w")] == [(1, 3), (2, 1)]
    prompts.acknowledge("w", 1)
    assert pending(prompts) == ["b"]
    assert pending(prompts, "other") == []


def test_a_prompt_returned_twice_before_it_is_seen_is_told_once() -> None:
    prompts = ReturnedPrompts()
    prompts.give_back("w", "a", 0)
    prompts.give_back("w", "a", 0)
    assert pending(prompts) == ["a"]


def test_numbers_grow_from_where_a_predecessor_may_have_been() -> None:
    prompts = ReturnedPrompts(after=100)
    prompts.give_back("w", "a", 0)
    assert prompts.pending("w")[0].seq == 101


def test_which_attempt_it_is_to_be_is_told_to_the_successor_too() -> None:
    prompts = ReturnedPrompts()
    prompts.give_back("w", "a", 0, attempt=2)
    prompts.acknowledge("w", 1)
    prompts.worker_died("w")
    assert [(prompt.prompt_id, prompt.attempt) for prompt in prompts.pending("w")] == [("a", 2)]


def test_what_a_dead_worker_acknowledged_but_did_not_run_is_told_to_its_successor() -> None:
    prompts = ReturnedPrompts()
    for name in ("lost", "running"):
        prompts.give_back("w", name, 0)
    prompts.acknowledge("w", 2)
    prompts.running_again("running")
    assert pending(prompts) == []
    prompts.worker_died("w")
    assert pending(prompts) == ["lost"]
    assert prompts.pending("w")[0].seq == 3


def test_a_prompt_that_the_trainer_has_after_all_is_not_told() -> None:
    prompts = ReturnedPrompts()
    prompts.give_back("w", "a", 0)
    prompts.running_again("a")
    assert pending(prompts) == []


def test_a_lease_runs_out_after_silence_and_is_named_once() -> None:
    leases = WorkerLeases(10.0)
    leases.renew("w", 0.0)
    leases.renew("v", 5.0)
    assert leases.expired(10.0) == []
    assert leases.expired(11.0) == ["w"]
    assert leases.expired(12.0) == []
    assert leases.workers == ["v"]
    leases.renew("w", 13.0)
    for _ in range(2):
        leases.end("w")
        assert leases.workers == ["v"]
