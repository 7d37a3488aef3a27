"""The spans of a partial output cover its tokens without gaps, for any order of updates and tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.inference.embedded.jobs import PartialOutput
from asyncrl.inference.engine_io import GenerationInput, SamplingSpec


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=12), st.integers(0, 3))
def test_each_token_has_the_version_that_was_in_force_when_it_was_made(
    changes: list[tuple[int, str]], last: int
) -> None:
    partial, labels = PartialOutput(), list[str]()
    for tokens, version in changes:
        labels += [partial.version] * tokens
        partial.relabel(version, len(labels))
    labels += [partial.version] * last
    request = GenerationInput("r", (1, 2), SamplingSpec())
    for _ in range(2):  # a reply changes nothing
        output = partial.reply(request, [0] * len(labels), [0.0] * len(labels), "now", None)
        reported = [(span.version, place) for span in output.spans for place in range(span.start, span.end)]
        assert reported == [(label, place) for place, label in enumerate(labels)]
    assert (output.weight_version, output.prompt_tokens) == ("now", 2)
