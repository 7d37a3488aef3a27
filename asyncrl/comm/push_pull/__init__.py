"""Trajectories from RolloutWorkers to data-parallel heads, each acknowledged.

A pusher holds one DEALER per puller, a puller one ROUTER, so acknowledgements flow back on the same connection. The
puller acknowledges only what its consumer has accepted: a puller that dies owes nothing, the pusher still holds every
trajectory that was not consumed and sends it again, to another puller if need be. One message carries what was pushed
at about the same time, one acknowledgement answers it, and a pusher does not wait for that before it sends the next.

Memory is bounded at both ends: a pusher holds `high_water` trajectories and then lets `push` wait; a puller whose
consumer has no room stops reading, which fills libzmq's buffers (bounded too) and then the pusher's.
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
