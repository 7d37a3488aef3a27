"""A sample's arrays belong together."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.api import Sample, Trajectory


def make(length: int = 3, **lengths: int) -> Sample:
    return Sample(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.array([0, 1, 1][: lengths.get("loss_mask", length)], dtype=np.uint8),
        behave_logprobs=np.zeros(lengths.get("behave_logprobs", length), dtype=np.float32),
        versions=np.array([-1, 4, 2][: lengths.get("versions", length)], dtype=np.int32),
        reward=1.0,
    )


@pytest.mark.parametrize("name", ["loss_mask", "behave_logprobs", "versions"])
def test_an_array_of_another_length_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Sample\.{name} has shape \(2,\), expected \(3,\)"):
        make(**{name: 2})


def test_an_empty_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        make(length=0)


def test_the_oldest_version_is_that_of_the_oldest_generated_token() -> None:
    sample = make()
    assert (sample.oldest_version, sample.generated_length) == (2, 2)
    assert Trajectory("r", "e0-1", 1, (sample, make())).oldest_version == 2
    assert Trajectory("r", "e0-1", 1, ()).oldest_version == -1
