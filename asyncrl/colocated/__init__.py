"""Optional: turns of the trainer and of generation servers on its devices (colocated servers, `generation.colocated`).

The MasterWorker announces turns in name resolution (`TrainerTurn`), and the GserverManager carries them out, with one
more state of a server and one more order (`FleetDecisions`, whose `ColocatedTurns` know the newest turn)::

    SERVING ── the trainer's turn ──▶ RELEASING ── memory released ──▶ ASLEEP
       ▲                                                                  │ the trainer's turn is over
       └── checked ── UPDATING: weights' memory, update, cache's memory ◀─┘

A step and a colocated server are never on a device together. A step begins once every such server sleeps. That holds
only during the trainer's turn, in which none leaves ASLEEP. A server's new process registers before it reads the turn,
and the manager looks for servers after the turn was announced. As both write first and read afterwards, at least one of
them sees the other. A server that dies has no memory; it counts once its name is gone.

The trainer gives the devices back before it waits for anything that servers do: rollouts for a batch, the end of
rollouts that would expire, an evaluation. It takes them when it has a batch. So

- a turn never begins without a batch: `SharedDevices.take` is called once the batch that is trained next is complete;
- there is no deadlock: while the trainer waits for data it does not have the devices. While it has them, it waits only
  for ranks, files and the manager, which need no colocated server. A server wakes without waiting for any other
  process. If the buffer lacks B rollouts, a server sleeps only until the current step has ended;
- no switch is useless: with B more rollouts in the buffer at the end of a step the next step follows in the same turn.
  The gate admits at most η + 1 batches ahead, so the servers never wait for more steps than that.

If there are servers elsewhere too, the trainer gives the devices back only if that completes the batch earlier
(`WakeRule`). It asks again while it waits, so colocated servers serve as soon as no other server does.

An evaluation needs servers. If all servers are colocated, a turn begins only when the evaluation is over, and is given
back if an evaluation begins.

The bound on staleness holds. The gate counts by the least version among serving servers. A sleeping server does not
serve. It comes back at the newest announced version, so the least version never falls because of its sleep.

`master` has the MasterWorker's part, `manager` the GserverManager's, `server` that of a colocated server;
`asyncrl.runtime.plan` names them.
"""
