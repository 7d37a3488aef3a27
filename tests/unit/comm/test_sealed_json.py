"""A sealed file is read as it was written, or not at all."""

from __future__ import annotations

import json

import pytest

from asyncrl.comm.files.sealed_json import seal, unseal

VALUE = {"used_prompts": {"count": 2, "epochs": {"0": "eJxjAQAACQAJ"}, "others": ["é"]}, "curriculum": [[1, 0, 0.5]]}


def test_a_sealed_value_is_read_back_and_is_json_for_others() -> None:
    data = seal(VALUE)
    assert unseal(data) == VALUE
    assert json.loads(data)["of"] == VALUE


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    data = seal(VALUE)
    flipped = [data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for at in range(len(data)) for bit in range(8)]
    for changed in (
        *flipped,
        *(data[:end] for end in range(len(data))),
        data + b"\n",
        b"{}",
        json.dumps(VALUE).encode(),
    ):
        with pytest.raises(ValueError, match="checksum"):
            unseal(changed)
