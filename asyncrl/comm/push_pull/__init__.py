"""Trajectories from RolloutWorkers to data-parallel heads, each acknowledged.

A pusher holds one DEALER per puller, a puller one ROUTER, so acknowledgements flow back on the same connection. The
puller acknowledges only what its consumer has accepted, so nothing is lost when a puller dies: the pusher still holds
every trajectory that was not consumed and sends it again, to another puller if need be. One message carries the
trajectories pushed at about the same time, and one acknowledgement answers it; a pusher does not wait for it before it
sends the next.

Memory is bounded at both ends: once a pusher holds `high_water` trajectories, `push` waits; a puller whose
consumer has no room stops reading, which fills libzmq's buffers (bounded too) and then the pusher's.
"""

from asyncrl.comm.push_pull.puller import InvalidTrajectory, PullerCounters, TrajectoryPuller
from asyncrl.comm.push_pull.pusher import TrajectoryPusher, TrajectoryRejected
from asyncrl.comm.push_pull.pushes import PushTimeout

__all__ = [
    "InvalidTrajectory",
    "PullerCounters",
    "PushTimeout",
    "TrajectoryPuller",
    "TrajectoryPusher",
    "TrajectoryRejected",
]
