from __future__ import annotations

import pytest

from asyncrl.inference.client import UnknownToken, check_tokens


@pytest.mark.parametrize(("prompt", "token"), [([0, 17, 3], 17), ([5, -1], -1)])
def test_a_token_outside_the_vocabulary_is_refused_by_name(prompt: list[int], token: int) -> None:
    check_tokens([0, 16], 17)
    check_tokens([], 17)
    with pytest.raises(UnknownToken, match=f"holds token id {token}, but the vocabulary has 17"):
        check_tokens(prompt, 17)
