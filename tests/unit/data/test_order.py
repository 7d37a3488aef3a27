from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.api.generation import seed_from
from asyncrl.config.plugin_code.import_paths import PluginError
from asyncrl.data import datasets
from asyncrl.data.datasets import load_dataset
from asyncrl.data.prompt_queue import (
    CACHED_EPOCHS,
    DataOrder,
    epoch_of,
    epoch_order,
    prompt_seed,
)


@given(st.integers(1, 40), st.integers(0, 2**31), st.integers(1, 3))
def test_each_epoch_has_each_prompt_once(num_rows: int, seed: int, epochs: int) -> None:
    order = DataOrder(num_rows, seed)
    refs = [order.ref(number) for number in range(epochs * num_rows)]
    expected = sorted(f"e{epoch}-{row}" for epoch in range(epochs) for row in range(num_rows))
    assert sorted(ref.prompt_id for ref in refs) == expected
    assert [order.order_of(ref.prompt_id) for ref in refs] == list(range(epochs * num_rows))


def test_prompts_of_any_epoch_are_found_though_few_permutations_are_kept() -> None:
    order, epochs = DataOrder(5, seed=3), [0, 1, 2, 3, 4, 5, 9, 2, 0, 9, 3]
    for epoch in epochs:
        for place in range(5 * epoch, 5 * epoch + 5):
            ref = DataOrder(5, seed=3).ref(place)
            assert order.ref(place) == ref
            assert order.order_of(ref.prompt_id) == place
        assert len(order._permutations) == len(order._positions) <= CACHED_EPOCHS
    assert sorted(order._permutations) == [3, 4, 5, 9], "of those that are kept, the oldest epoch leaves"


def test_an_order_is_shuffled_unless_the_settings_say_otherwise() -> None:
    order = DataOrder(30, seed=3)
    assert [order.ref(place).row for place in range(30)] == epoch_order(30, 3, 0).tolist() != list(range(30))
    assert order.ref(0).attempt == 0


def test_an_order_ends_after_its_epochs() -> None:
    assert DataOrder(10, 0).end is None
    assert DataOrder(10, 0, epochs=2).end == 20
    assert DataOrder(10, 0, epochs=1.55).end == 15


def test_the_epoch_of_a_prompt_is_in_its_id() -> None:
    assert [epoch_of(prompt) for prompt in ("e0-3", "e12-0", "mine", "x7", "")] == [0, 12, 0, 7, 0]


def test_each_attempt_at_a_prompt_has_random_numbers_of_its_own() -> None:
    assert len({prompt_seed(3, order, attempt) for order in range(100) for attempt in range(4)}) == 400
    assert prompt_seed(3, 5, 0) == prompt_seed(3, 5) == seed_from("prompt", 3, 5)


@pytest.mark.parametrize("prompt_id", ["", "e0", "0-1", "e0-10", "e-1-2", "ex-1", "e0-1-2"])
def test_an_id_that_names_no_prompt_is_refused(prompt_id: str) -> None:
    with pytest.raises(ValueError, match="names no prompt"):
        DataOrder(10, seed=1).order_of(prompt_id)


def test_a_dataset_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="num_rows is 0"):
        DataOrder(0, 1)


def test_epochs_differ_and_repeat_under_the_same_seed() -> None:
    assert epoch_order(50, 1, 0).tolist() == epoch_order(50, 1, 0).tolist()
    assert epoch_order(50, 1, 0).tolist() != epoch_order(50, 1, 1).tolist()


def test_prompt_seeds_are_distinct_and_fit_31_bits() -> None:
    seeds = {prompt_seed(run, order) for run in range(3) for order in range(1000)}
    assert len(seeds) >= 2999
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_seed_parts_are_kept_apart() -> None:
    assert seed_from("a", 1, 23) != seed_from("a", 12, 3)


def test_unshuffled_epochs_visit_the_rows_in_their_order() -> None:
    order = DataOrder(4, seed=7, shuffle=False)
    assert [order.ref(place).prompt_id for place in range(9)] == [
        *("e0-0", "e0-1", "e0-2", "e0-3"),
        *("e1-0", "e1-1", "e1-2", "e1-3", "e2-0"),
    ]
    assert all(order.order_of(order.ref(place).prompt_id) == place for place in range(9))


class Items:
    """A map-style dataset of torch's."""

    def __init__(self, split: str, seed: int, item: object = None) -> None:
        self.item = item

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> object:
        return {"prompt": f"row {index}"} if self.item is None else self.item


def test_a_map_style_dataset_is_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_plugin", lambda path: Items)
    loaded = load_dataset("mine:Items", {}, "train", 0)
    assert (len(loaded), loaded.row(2)) == (3, {"prompt": "row 2"})
    with pytest.raises(PluginError, match="item 0 is a str; a row is a mapping with a `prompt`"):
        load_dataset("mine:Items", {"item": "text"}, "train", 0)
