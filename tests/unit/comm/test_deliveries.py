"""What a puller does with a message, whoever sent it."""

from __future__ import annotations

import numpy as np
import zmq

from asyncrl.api import Sample, Trajectory
from asyncrl.comm.push_pull import Accepted, InvalidTrajectory, Refused, TrajectoryPuller, encode
from asyncrl.comm.sockets import Frame
from asyncrl.comm.trajectory_codec import encode_trajectories


def message(numbers: list[int], *names: str) -> list[zmq.Frame]:
    tokens = np.arange(3, dtype=np.int32)
    sample = Sample(tokens, np.ones(3, np.uint8), np.zeros(3, np.float32), tokens, 1.0)
    sent = encode_trajectories([Trajectory(name, "prompt", 0, (sample,)) for name in names])
    frames: list[Frame] = [encode(numbers), *sent]
    return [zmq.Frame(bytes(frame)) for frame in frames]


def test_accepted_ones_and_duplicates_are_acknowledged_together_after_the_refusals() -> None:
    taken: list[str] = []

    def consume(trajectory: Trajectory) -> None:
        if trajectory.rollout_id == "bad":
            raise InvalidTrajectory("a reward is missing")
        if trajectory.rollout_id == "later":
            raise OSError("disk full")
        taken.append(trajectory.rollout_id)

    puller = TrajectoryPuller("127.0.0.1", None, on_message=consume)
    replies = puller._deliver(message([3, 4, 5, 6, 7], "a", "bad", "later", "b", "a"))
    assert replies == [Refused([4], "a reward is missing"), Accepted([3, 6, 7])]
    assert taken == ["a", "b"]
    assert puller._deliver(message([5], "later")) == [], "what was not accepted is not acknowledged"
    counts = puller.counts
    assert (counts["received"], counts["duplicate"], counts["malformed"], counts["refused"]) == (2, 1, 1, 2)
    puller.close()


def test_a_message_with_numbers_for_other_trajectories_is_refused_whole() -> None:
    puller = TrajectoryPuller("127.0.0.1", None, on_message=lambda trajectory: None)
    replies = puller._deliver(message([1, 2, 3], "a"))
    assert replies == [Refused([1, 2, 3], "message has 3 numbers for 1 trajectories")]
    assert puller._deliver([zmq.Frame(b"no numbers")]) == [], "a message without numbers has no answer"
    assert puller.counts["malformed"] == 2
    puller.close()
