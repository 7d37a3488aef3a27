"""Trajectories from RolloutWorkers to data-parallel heads, each acknowledged.

Acknowledgements use the connection of the trajectories. The puller acknowledges only what its consumer has accepted.
So nothing is lost when a puller dies: the pusher still holds every trajectory that was not consumed and sends it again,
if necessary to another puller. One message carries the trajectories pushed at about the same time, and one
acknowledgement answers it. A pusher sends the next message without waiting for the acknowledgement.

Memory is bounded at both ends. Once a pusher holds `high_water` trajectories, `push` waits. A puller whose consumer has
no room stops reading, which fills libzmq's buffers (also bounded) and then the pusher's.
"""

from asyncrl.comm.push_pull.puller import InvalidTrajectory, PullerCounters, TrajectoryPuller
from asyncrl.comm.push_pull.pusher import PushTimeout, TrajectoryPusher, TrajectoryRejected

__all__ = [
    "InvalidTrajectory",
    "PullerCounters",
    "PushTimeout",
    "TrajectoryPuller",
    "TrajectoryPusher",
    "TrajectoryRejected",
]
