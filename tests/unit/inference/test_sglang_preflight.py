from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncrl.inference.sglang.preflight import (
    IncompatibleWeights,
    UnknownToken,
    check_tokens,
    check_weights,
    read_signature,
)

SERVING = {"embed": ("F32", (17, 8)), "norm": ("F32", (8,))}


def test_the_signature_covers_every_shard(tmp_path: Path) -> None:
    save_file({"embed": np.zeros((17, 8), np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"norm": np.zeros(8, np.float16)}, tmp_path / "model-00002-of-00002.safetensors")
    assert read_signature(tmp_path) == {"embed": ("F32", (17, 8)), "norm": ("F16", (8,))}


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleWeights, match="holds no"):
        read_signature(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_a_torn_file_is_refused_wherever_it_was_cut(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"embed": np.zeros((17, 8), np.float32)}, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(IncompatibleWeights, match="torn"):
        read_signature(tmp_path)


def test_the_same_shapes_in_another_dtype_are_accepted() -> None:
    check_weights(SERVING, {"embed": ("BF16", (17, 8)), "norm": ("BF16", (8,))}, tied=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed": ("F32", (18, 8))}, r"embed has shape \[18, 8\], the server's has \[17, 8\]"),
        ({"other": ("F32", (8,))}, "other is unknown"),
        ({"norm": None}, "norm is missing"),
    ],
)
def test_weights_that_would_kill_the_server_are_refused(change: dict[str, object], message: str) -> None:
    new = {name: entry for name, entry in (SERVING | change).items() if entry is not None}
    with pytest.raises(IncompatibleWeights, match=message):
        check_weights(SERVING, new, tied=False)


def test_a_tied_output_layer_may_be_there_or_not() -> None:
    with_head = SERVING | {"lm_head.weight": ("F32", (17, 8))}
    check_weights(SERVING, with_head, tied=True)
    check_weights(with_head, SERVING, tied=True)
    with pytest.raises(IncompatibleWeights, match=r"lm_head\.weight is missing"):
        check_weights(with_head, SERVING, tied=False)


@pytest.mark.parametrize(("prompt", "token"), [([1, 17], 17), ([-1], -1), ([3, 4, 99, 2], 99)])
def test_a_token_outside_the_vocabulary_is_refused(prompt: list[int], token: int) -> None:
    check_tokens([[0, 16], []], 17)
    with pytest.raises(UnknownToken, match=f"prompt 1 holds token id {token}, but the vocabulary has 17"):
        check_tokens([[0, 16], prompt], 17)
