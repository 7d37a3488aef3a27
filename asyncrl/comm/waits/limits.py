"""How long one process waits for another, in seconds: the waits that several places share.

A wait is one of these kinds. What is left has a single place and stands there, with its reason; `docs/faults.md` lists
all.
"""

from __future__ import annotations

BURST_S = 0.01
"""For what ends together to become one message, while somebody waits: a hundredth of the shortest useful step."""
GATHER_S = 0.05
"""For what happens shortly after to become part of a message that nobody waits for at once."""
LOOK_S = 0.5
"""Between two looks at what wakes nobody: a name, a process, a file, a counter of a peer. A request to stop that comes
meanwhile waits no longer than a person notices.
"""
ASK_S = 5.0
"""Between two questions for signs of life, at most a quarter of the limit that they guard; and between two looks at
what changes slowly.
"""
ANSWER_S = 5.0
"""For an answer that the caller can do without. A living process gives it in milliseconds, or in a second if all cores
of the machine are busy.
"""
CALL_S = 20.0
"""For an answer that the caller needs, beyond the time for which the call may be held. Only a suspended or stuck
process takes longer: when one dies, its connections break.
"""
HOLD_S = 5.0
"""For which a call is held until there is something to answer. Then the caller repeats it, which renews its lease."""
CLOSE_S = 0.4
"""For one connection to close. A RolloutWorker closes five, one after the other: trajectories, servers, tools,
endpoint, manager. So it stops in time if no other end responds.
"""
STOP_S = 3.0
"""For a process to end after it was asked to; then it is killed."""
PAUSE_S = 120.0
"""For which a call is repeated until the peer counts as dead. A pause of a minute, of either process, is no death."""
PATIENCE_S = 600.0
"""For what a person can mend or a large model needs: a full disk, ranks that take no trajectories, a start."""
REPEAT_S = 60.0
"""Within which the same message is not logged again."""
TOOL_S = 20.0
"""For a program that shows the state of a machine or a process. A sleeping GPU driver takes seconds to wake."""
