"""The tree of kept rows: whatever goes in and out, a prefix gets its own rows and the room is kept."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncrl.inference.embedded.cache import Prefix
from asyncrl.inference.embedded.prefix_cache import Match, Node, PrefixCache, Rows
from tests.examples import examples

prefixes = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)


def marks(tokens: Prefix) -> torch.Tensor:
    """A row for each position that tells everything up to it, `[positions, 1]`."""
    return torch.tensor([[hash(tokens[: at + 1])] for at in range(len(tokens))])


def reader(tokens: Prefix) -> Callable[[int, int], Rows]:
    return lambda start, end: [marks(tokens)[start:end].clone(), marks(tokens)[None, start:end].clone()]


def state_of(tokens: Prefix) -> Callable[[], Rows]:
    return lambda: [torch.tensor([hash((tokens, "state"))])]


def nodes(cache: PrefixCache) -> list[Node]:
    found, below = [], list(cache._roots.values())
    while below:
        node = below.pop()
        below += node.children.values()
        found += [node] if node.tokens else []
    return found


def assert_of(match: Match, prefix: Prefix) -> None:
    """Rows and states are those of the prefix itself."""
    for dimension in (0, 1):
        rows = [node.rows[dimension].narrow(-2, 0, used) for node, used in match.path]
        assert torch.equal(torch.cat(rows, dim=-2).view(-1, 1), marks(prefix[: match.length]))


class AnyUse(RuleBasedStateMachine):
    """Requests of a few versions in a room that changes."""

    @initialize(states=st.booleans())
    def begin(self, states: bool) -> None:
        self.has_states, self.epoch = states, 0
        self.cache = PrefixCache(has_states=states)
        self.capacity = (30, 4)
        self.cache.fit(*self.capacity)
        self.reported: list[tuple[int, Prefix, bool]] = []

    @rule(tokens=prefixes, ends=st.booleans(), back=st.integers(0, 1))
    def keep(self, tokens: Prefix, ends: bool, back: int) -> None:
        epoch = max(0, self.epoch - back)
        states = state_of(tokens) if self.has_states else None
        if self.cache.insert(tokens, epoch, reader(tokens), states, ends_turn=ends):
            self.reported.append((epoch, tokens, ends))
            found = self.cache.match(tokens, epoch)
            assert found is not None
            assert found.length == len(tokens), "what was just taken in is there"

    @rule(prefix=prefixes)
    def ask(self, prefix: Prefix) -> None:
        found = self.cache.match(prefix, self.epoch)
        if found is None:
            return
        assert_of(found, prefix)
        if self.has_states:
            assert found.states is not None
            assert torch.equal(found.states[0], state_of(prefix[: found.length])()[0])
        if found.epoch != self.epoch:
            ends = [len(tokens) for epoch, tokens, ends in self.reported if ends and prefix[: len(tokens)] == tokens]
            assert ends, "older weights only for those whose answer they computed"
            assert min(ends) <= found.length

    @rule(tokens=st.integers(0, 40), states=st.integers(0, 5))
    def change_room(self, tokens: int, states: int) -> None:
        self.capacity = (tokens, states)
        self.cache.fit(*self.capacity)

    @rule(keep=st.booleans())
    def change_weights(self, keep: bool) -> None:
        self.epoch += 1
        if not keep:
            self.cache.clear()

    @invariant()
    def nothing_leaks(self) -> None:
        there = nodes(self.cache)
        assert self.cache.tokens == sum(len(node.tokens) for node in there) <= self.capacity[0]
        assert self.cache.states == sum(node.states is not None for node in there)
        assert not self.has_states or self.cache.states <= self.capacity[1]
        assert all(rows.shape[-2] == len(node.tokens) for node in there for rows in node.rows)
        assert all(root.children for root in self.cache._roots.values())
        assert not self.has_states or all(node.children or node.states for node in there)

    def teardown(self) -> None:
        self.cache.fit(0, 0)
        assert (self.cache.tokens, self.cache.states, nodes(self.cache)) == (0, 0, [])


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=examples(80), stateful_step_count=25, deadline=None)


@given(st.lists(prefixes, min_size=1, max_size=12), prefixes)
def test_with_room_the_longest_common_prefix_is_found(kept: list[Prefix], asked: Prefix) -> None:
    cache = PrefixCache()
    cache.fit(1000, 0)
    for tokens in kept:
        assert cache.insert(tokens, 7, reader(tokens), None)
    known = {tokens[:length] for tokens in kept for length in range(1, len(tokens) + 1)}
    longest = max((length for length in range(len(asked) + 1) if asked[:length] in known), default=0)
    found = cache.match(asked, 7)
    assert (0 if found is None else found.length) == longest
    assert cache.tokens == len(known), "what they have in common is there once"
    assert cache.evicted == 0


def test_what_was_not_used_for_longest_goes_first() -> None:
    cache = PrefixCache()
    cache.fit(9, 0)
    for first in (1, 2, 3):
        tokens = (first, 0, 0)
        cache.insert(tokens, 0, reader(tokens), None)
    cache.match((1, 0, 0, 5), 0)
    cache.insert((4, 0), 0, reader((4, 0)), None)
    assert [cache.match((first, 0, 0), 0) is not None for first in (1, 2, 3, 4)] == [True, False, True, True]
    assert cache.was_full
    assert cache.evicted == 3
    assert not cache.insert(tuple(range(5, 15)), 0, reader(tuple(range(5, 15))), None), "more than all of the room"


class Seen:
    """A picture that somebody holds."""


def test_rows_of_a_picture_that_nobody_holds_are_gone() -> None:
    held = {100: Seen(), 200: Seen()}
    cache = PrefixCache(
        pictures_in=lambda tokens: [(at, held[token]) for at, token in enumerate(tokens) if token in held]
    )
    cache.fit(100, 0)
    first, second = (1, 100, 101, 2, 3), (1, 200, 201, 2, 3)
    for tokens in (first, second, (1, 100, 101, 2, 4)):
        cache.insert(tokens, 0, reader(tokens), None)
    found = cache.match(first, 0)
    assert found is not None
    assert found.length == 5
    del held[100], found
    gc.collect()
    held[100] = Seen()  # another picture has these ids now
    found = cache.match(first, 0)
    assert found is not None
    assert found.length == 1
    assert cache.tokens == 5, "what followed the picture is gone too"
    cache.insert(first, 0, reader(first), None)
    assert cache.tokens == 9
    found = cache.match(second, 0)
    assert found is not None
    assert found.length == 5
