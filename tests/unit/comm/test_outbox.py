from __future__ import annotations

from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncrl.comm.push_pull import Outbox, Push
from tests.examples import examples


def make_outbox(*peers: str, high_water: int = 100, resend_after_s: float = 5.0) -> Outbox:
    outbox = Outbox(high_water=high_water, resend_after_s=resend_after_s)
    outbox.set_peers(peers)
    return outbox


def add(outbox: Outbox, rollout_id: str) -> Push:
    push = Push(rollout_id, cast(Any, None), cast(Any, None))
    outbox.add(push)
    return push


def send_all(outbox: Outbox, writable: set[str], now: float = 0.0) -> list[tuple[int, str]]:
    sent = []
    while (taken := outbox.take(writable, now)) is not None:
        sent.append((taken[0].seq, taken[1]))
    return sent


def test_entries_are_sent_in_order_to_the_peer_with_the_fewest_in_flight() -> None:
    outbox = make_outbox("a", "b")
    for label in "xyz":
        add(outbox, label)
    sent = send_all(outbox, {"a", "b"})
    assert [seq for seq, _ in sent] == [0, 1, 2]
    assert sent[0][1] == sent[2][1] != sent[1][1]
    assert outbox.acked(1) is not None
    fourth = add(outbox, "w")
    taken = outbox.take(["a", "b"], 0.0)
    assert taken is not None
    assert taken[0] is fourth


def test_an_entry_is_kept_until_it_is_acknowledged_and_forgotten_once() -> None:
    outbox = make_outbox("a")
    entry = add(outbox, "x")
    send_all(outbox, {"a"})
    assert outbox.entries == [entry]
    assert outbox.acked(entry.seq) is entry
    assert outbox.acked(entry.seq) is None
    assert len(outbox) == 0


def test_the_high_water_mark_bounds_what_is_kept() -> None:
    outbox = make_outbox("a", high_water=2)
    add(outbox, "x")
    add(outbox, "y")
    assert outbox.full
    outbox.acked(0)
    assert not outbox.full


def test_a_silent_peer_gets_the_entry_again_when_it_is_due() -> None:
    outbox = make_outbox("a", "b", resend_after_s=5.0)
    add(outbox, "x")
    ((_, first),) = send_all(outbox, {"a", "b"}, now=1.0)
    assert outbox.next_due() == 6.0
    assert outbox.expire(5.9) == []
    assert [entry.rollout_id for entry in outbox.expire(6.0)] == ["x"]
    assert outbox.take({"a", "b"} - {first}, 6.0) is None
    assert send_all(outbox, {"a", "b"}, now=6.0) == [(0, first)]
    assert outbox.next_due() == 11.0


def test_after_a_lost_connection_any_peer_may_take_the_entry() -> None:
    outbox = make_outbox("a", "b")
    add(outbox, "x")
    ((_, first),) = send_all(outbox, {"a", "b"})
    outbox.lost(first)
    (other,) = {"a", "b"} - {first}
    assert send_all(outbox, {other}) == [(0, other)]


def test_entries_of_a_peer_that_left_go_to_those_that_stay() -> None:
    outbox = make_outbox("a")
    add(outbox, "x")
    add(outbox, "y")
    send_all(outbox, {"a"})
    outbox.set_peers(["b", "c"])
    assert sorted(peer for _, peer in send_all(outbox, {"b", "c"})) == ["b", "c"]
    assert outbox.peers == ["b", "c"]


def test_an_entry_bound_to_a_blocked_peer_does_not_hold_up_the_rest() -> None:
    outbox = make_outbox("a", "b")
    add(outbox, "x")
    send_all(outbox, {"a"})
    outbox.expire(5.0)
    add(outbox, "y")
    assert send_all(outbox, {"b"}) == [(1, "b")]


def test_what_the_connection_did_not_take_waits_in_front_in_order() -> None:
    outbox = make_outbox("a")
    for label in "xyz":
        add(outbox, label)
    taken = [outbox.take({"a"}, 0.0) for _ in range(2)]
    outbox.untake([item[0] for item in taken if item is not None])
    assert outbox.next_due() is None
    assert [seq for seq, _ in send_all(outbox, {"a"})] == [0, 1, 2]


def test_an_entry_acknowledged_while_it_waits_is_not_sent_again() -> None:
    outbox = make_outbox("a")
    add(outbox, "x")
    send_all(outbox, {"a"})
    outbox.expire(5.0)
    outbox.acked(0)
    assert outbox.take({"a"}, 5.0) is None


class OutboxMachine(RuleBasedStateMachine):
    """Any order of events: nothing is lost, nothing is in two places, and loads are counted right."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.outbox = make_outbox("a", "b", "c", high_water=20)
        self.kept: set[int] = set()
        self.flying: dict[int, str] = {}

    @rule()
    def add(self) -> None:
        if not self.outbox.full:
            self.kept.add(add(self.outbox, "x").seq)

    @rule(writable=st.sets(st.sampled_from("abcd")))
    def take(self, writable: set[str]) -> None:
        writable &= set(self.outbox.peers)
        taken = self.outbox.take(writable, self.now)
        if taken is not None:
            entry, peer = taken
            assert entry.seq in self.kept
            assert entry.seq not in self.flying
            assert peer in writable
            self.flying[entry.seq] = peer

    @rule(seq=st.integers(0, 40))
    def ack(self, seq: int) -> None:
        assert (self.outbox.acked(seq) is not None) == (seq in self.kept)
        self.kept.discard(seq)
        self.flying.pop(seq, None)

    @rule(seconds=st.floats(0, 10))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for entry in self.outbox.expire(self.now):
            del self.flying[entry.seq]

    @rule(peer=st.sampled_from("abcd"))
    def lose(self, peer: str) -> None:
        if peer in self.outbox.peers:
            self.outbox.lost(peer)
            self.flying = {seq: at for seq, at in self.flying.items() if at != peer}

    @rule(peers=st.sets(st.sampled_from("abcd")))
    def change_peers(self, peers: set[str]) -> None:
        self.outbox.set_peers(sorted(peers))
        self.flying = {seq: at for seq, at in self.flying.items() if at in peers}

    @invariant()
    def everything_kept_is_waiting_or_in_flight(self) -> None:
        assert len(self.outbox) == len(self.kept)
        assert (self.outbox.next_due() is None) == (not self.flying)

    def teardown(self) -> None:
        self.outbox.set_peers(["z"])
        assert {seq for seq, _ in send_all(self.outbox, {"z"}, self.now)} == self.kept


TestOutboxMachine = OutboxMachine.TestCase
TestOutboxMachine.settings = settings(max_examples=examples(60), stateful_step_count=40)
