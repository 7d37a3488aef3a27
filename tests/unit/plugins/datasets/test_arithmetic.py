from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.plugin_code.import_paths import PluginError
from asyncrl.data.datasets import load_dataset
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset, add_without_carry, split_of, written_out
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward

NUMBERS = st.lists(st.integers(1, 99), min_size=2, max_size=8)
ARITHMETIC = "asyncrl.plugins.datasets.arithmetic:ArithmeticDataset"


def test_the_answer_writes_every_step_out() -> None:
    assert written_out([37, 5, 81, 9]) == "37+5=42;42+81=123;123+9=132#132"


@given(NUMBERS)
def test_the_written_out_answer_earns_the_reward(numbers: list[int]) -> None:
    assert arithmetic_reward({"answer": str(sum(numbers))}, written_out(numbers)) == 1.0


@given(NUMBERS, st.randoms(use_true_random=False))
def test_the_split_does_not_depend_on_the_order_of_the_numbers(numbers: list[int], rng: random.Random) -> None:
    shuffled = list(numbers)
    rng.shuffle(shuffled)
    assert split_of(shuffled) == split_of(numbers)


@pytest.mark.parametrize(("train_seed", "held_out_seed"), [(1, 1), (2, 1), (1001, 0)])
def test_no_held_out_problem_occurs_in_training_under_any_seeds(train_seed: int, held_out_seed: int) -> None:
    train = ArithmeticDataset(split="train", seed=train_seed, num_rows=4000)
    held_out = ArithmeticDataset(split="held_out", seed=held_out_seed, num_rows=500)
    trained = {tuple(sorted(train.numbers(i))) for i in range(len(train))}
    assert not trained & {tuple(sorted(held_out.numbers(i))) for i in range(len(held_out))}


def test_rows_depend_on_seed_and_index_alone() -> None:
    first, second = ArithmeticDataset(seed=3), ArithmeticDataset(seed=3)
    assert [first.row(i) for i in (7, 2, 7)] == [second.row(i) for i in (7, 2, 7)]
    assert first.row(7) != ArithmeticDataset(seed=4).row(7)


def test_rows_have_two_to_max_numbers() -> None:
    dataset = ArithmeticDataset(max_numbers=4)
    assert {len(dataset.numbers(i)) for i in range(200)} == {2, 3, 4}


@pytest.mark.parametrize(
    ("left", "right", "expected"), [(37, 5, 32), (42, 81, 123), (95, 9, 94), (123, 9, 122), (7, 8, 15), (199, 1, 190)]
)
def test_forgetting_the_carry_loses_it_in_every_column_but_the_last(left: int, right: int, expected: int) -> None:
    assert add_without_carry(left, right) == expected


def test_careless_demonstrations_err_exactly_where_there_is_a_carry() -> None:
    careless = ArithmeticDataset(forget_carry=1.0)
    for index in range(200):
        row, numbers = careless.row(index), careless.numbers(index)
        carries, total = False, numbers[0]
        for number in numbers[1:]:
            carries |= add_without_carry(total, number) != total + number
            total = add_without_carry(total, number)
        assert (careless.demonstration(row) != written_out(numbers)) == carries


def test_a_careless_demonstration_is_the_same_on_every_call() -> None:
    dataset = ArithmeticDataset(forget_carry=0.5)
    assert [dataset.demonstration(dataset.row(i)) for i in range(50)] == [
        dataset.demonstration(dataset.row(i)) for i in range(50)
    ]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"split": "test"}, "split"),
        ({"num_rows": 0}, "num_rows"),
        ({"max_numbers": 1}, "max"),
        ({"forget_carry": 2}, "forget"),
    ],
)
def test_a_bad_argument_is_named_in_the_error(bad: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ArithmeticDataset(**bad)  # type: ignore[arg-type]


def test_a_row_outside_the_dataset_raises() -> None:
    with pytest.raises(IndexError):
        ArithmeticDataset(num_rows=3).row(3)


def test_load_dataset_takes_an_import_path_with_its_arguments() -> None:
    dataset = load_dataset(ARITHMETIC, {"num_rows": 5, "max_numbers": 3}, "held_out", 2)
    assert len(dataset) == 5
    assert dataset.row(0) == ArithmeticDataset(split="held_out", seed=2, num_rows=5, max_numbers=3).row(0)


def test_load_dataset_refuses_what_is_no_dataset() -> None:
    with pytest.raises(PluginError, match="row"):
        load_dataset("builtins:dict", {}, "train", 1)


@pytest.mark.parametrize("completion", ["", "132", "1+2=3", "#13", "#132#132", "# 132", "#0132"])
def test_anything_but_the_exact_result_after_the_marker_earns_nothing(completion: str) -> None:
    assert arithmetic_reward({"answer": "132"}, completion) == 0.0
