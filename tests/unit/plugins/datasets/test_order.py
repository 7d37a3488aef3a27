from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.plugins.datasets.order import LentPrompts, PromptStream, epoch_order, prompt_seed, seed_from

ROWS, SHARDS, SEEDS = st.integers(1, 40), st.integers(1, 7), st.integers(0, 2**31)


def shards_of(num_rows: int, seed: int, num_shards: int, used: list[str] | None = None) -> list[PromptStream]:
    return [PromptStream(num_rows, seed, shard, num_shards, used or ()) for shard in range(num_shards)]


def take_below(stream: PromptStream, limit: int) -> list[str]:
    """Ids that the stream hands out with an order below `limit`; the first beyond is given back."""
    taken = []
    while (ref := stream.next()).order < limit:
        taken.append(ref.prompt_id)
    stream.give_back(ref.prompt_id)
    return taken


@given(ROWS, SEEDS, SHARDS, st.integers(1, 3))
def test_the_shards_together_hand_out_each_prompt_of_each_epoch_once(
    num_rows: int, seed: int, num_shards: int, epochs: int
) -> None:
    taken = [id_ for shard in shards_of(num_rows, seed, num_shards) for id_ in take_below(shard, epochs * num_rows)]
    assert sorted(taken) == sorted(f"e{epoch}-{row}" for epoch in range(epochs) for row in range(num_rows))


@given(ROWS, SEEDS, SHARDS)
def test_the_order_of_a_prompt_does_not_depend_on_the_number_of_shards(
    num_rows: int, seed: int, num_shards: int
) -> None:
    alone = PromptStream(num_rows, seed)
    expected = {(ref := alone.next()).prompt_id: ref.order for _ in range(2 * num_rows)}
    for shard in shards_of(num_rows, seed, num_shards):
        while (ref := shard.next()).order < 2 * num_rows:
            assert expected[ref.prompt_id] == ref.order
            assert shard.order_of(ref.prompt_id) == ref.order


@given(ROWS, SEEDS, SHARDS, SHARDS, st.data())
def test_a_restart_with_another_number_of_shards_trains_each_prompt_once(
    num_rows: int, seed: int, before: int, after: int, data: st.DataObject
) -> None:
    """Some prompts are trained, some are out or given back at the crash; the new shards hand out exactly the rest."""
    trained: list[str] = []
    for shard in shards_of(num_rows, seed, before):
        for _ in range(data.draw(st.integers(0, num_rows // before))):
            ref = shard.next()
            fate = data.draw(st.sampled_from(["trained", "out", "given back"]))
            if fate == "trained":
                trained.append(ref.prompt_id)
            elif fate == "given back":
                shard.give_back(ref.prompt_id)
    limit = 2 * num_rows
    rest = [id_ for shard in shards_of(num_rows, seed, after, trained) for id_ in take_below(shard, limit)]
    assert sorted(rest + trained) == sorted(f"e{epoch}-{row}" for epoch in range(2) for row in range(num_rows))


def test_a_prompt_given_back_comes_before_any_later_one() -> None:
    stream = PromptStream(10, seed=1)
    first, second, _ = stream.next(), stream.next(), stream.next()
    stream.give_back(second.prompt_id)
    stream.give_back(first.prompt_id)
    assert [stream.next(), stream.next()] == [first, second]
    assert stream.next().order == 3


def test_a_prompt_put_off_comes_as_its_next_attempt_after_the_rest_of_the_epoch() -> None:
    stream = PromptStream(4, seed=1)
    first, second = stream.next(), stream.next()
    stream.give_back(first.prompt_id, attempt=1)
    rest = [stream.next().order, stream.next().order]
    assert rest == [2, 3]
    again = stream.next()
    assert again == replace(first, attempt=1)
    stream.give_back(again.prompt_id, attempt=1)
    assert stream.next() == again, "the same attempt, as where its server died, comes at once"
    stream.give_back(again.prompt_id, attempt=2)
    stream.give_back(second.prompt_id)
    assert [stream.next() for _ in range(5)][::4] == [second, stream.ref(7)]
    assert stream.next() == replace(first, attempt=2)


def test_each_attempt_at_a_prompt_has_random_numbers_of_its_own() -> None:
    assert len({prompt_seed(3, order, attempt) for order in range(100) for attempt in range(4)}) == 400
    assert prompt_seed(3, 5, 0) == prompt_seed(3, 5) == seed_from("prompt", 3, 5)


def test_a_prompt_that_was_not_handed_out_cannot_be_given_back() -> None:
    stream = PromptStream(10, seed=1)
    ref = stream.next()
    stream.give_back(ref.prompt_id)
    with pytest.raises(ValueError, match="not out"):
        stream.give_back(ref.prompt_id)


@pytest.mark.parametrize("prompt_id", ["", "e0", "0-1", "e0-10", "e-1-2", "ex-1", "e0-1-2"])
def test_an_id_that_names_no_prompt_is_refused(prompt_id: str) -> None:
    with pytest.raises(ValueError, match="names no prompt"):
        PromptStream(10, seed=1).order_of(prompt_id)


@pytest.mark.parametrize("arguments", [(0, 1, 0, 1), (5, 1, 2, 2), (5, 1, -1, 2)])
def test_impossible_shards_are_refused(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"num_rows|shard_index"):
        PromptStream(*arguments)


def test_epochs_differ_and_repeat_under_the_same_seed() -> None:
    assert epoch_order(50, 1, 0).tolist() == epoch_order(50, 1, 0).tolist()
    assert epoch_order(50, 1, 0).tolist() != epoch_order(50, 1, 1).tolist()


def test_prompt_seeds_are_distinct_and_fit_31_bits() -> None:
    seeds = {prompt_seed(run, order) for run in range(3) for order in range(1000)}
    assert len(seeds) >= 2999
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_seed_parts_are_kept_apart() -> None:
    assert seed_from("a", 1, 23) != seed_from("a", 12, 3)


def test_what_a_stream_before_handed_out_comes_again_only_if_it_is_given_back() -> None:
    before = PromptStream(6, seed=1)
    trained, at_the_trainer, returned, unseen = (before.next() for _ in range(4))
    out = {trained.prompt_id: 0, at_the_trainer.prompt_id: 0, returned.prompt_id: 2}
    stream = PromptStream(6, seed=1, used=[trained.prompt_id], out=out)
    stream.give_back(returned.prompt_id, 2)
    assert stream.next() == replace(returned, attempt=2)
    assert stream.next() == unseen
    stream.give_back(at_the_trainer.prompt_id)
    assert [stream.next().order for _ in range(3)] == [at_the_trainer.order, 4, 5]
    with pytest.raises(ValueError, match="is not out"):
        stream.give_back(trained.prompt_id)


def test_lent_prompts_come_in_the_data_order_as_the_attempt_that_they_were_lent_as() -> None:
    order = PromptStream(5, seed=3)
    refs = [order.next() for _ in range(7)]
    lent = LentPrompts(5, seed=3)
    assert lent.next() is None
    for number in (6, 2, 4):
        lent.give_back(refs[number].prompt_id, attempt=number)
    with pytest.raises(ValueError, match="is here already"):
        lent.give_back(refs[2].prompt_id)
    with pytest.raises(ValueError, match="names no prompt of 5 rows"):
        lent.give_back("e0-5")
    assert [lent.next() for _ in range(4)] == [*(replace(refs[n], attempt=n) for n in (2, 4, 6)), None]
    lent.give_back(refs[4].prompt_id)
    assert lent.next() == refs[4]
