"""Recovery of the brain (MasterWorker, GserverManager, all ModelWorkers), whose processes restart together after any
death. `docs/faults.md` has the user's view, with a picture; `asyncrl.manager.rollouts.rebuild` has the manager's side.

A run's beginning, a resume and a death are one path (`beginning`): load a state, ask the others what they hold, open
the gate. The state of a step is complete or not there. What it has, and who else has what a run goes on with:

    fact                                 kept by, besides its owner            read by
    -----------------------------------  ------------------------------------  ----------------------------------------
    weights, moments, random states      the state of the last step            the new ranks
    used prompts, counters, tries of     the state of the last step            the new GserverManager
      prompts, the ledger's line
    metrics, win rates, the order        the state of the last step            the new MasterWorker
    trajectories that wait               inboxes, as files                     the new ranks
    running rollouts                     their RolloutWorkers                  the new GserverManager
    the announced version                name resolution                       everybody

The state is that of the last step in the hosts' memory. If that is lost (a lost host, `checkpoint.in_memory=false`), it
is the newest checkpoint on disk, and the whole run begins again with it.

One rule makes this safe: **no process outside the brain sees a step before its state is complete** (`step_end`). So a
new brain knows at least as much as the others. It announces the state's version again, which servers recognise, and the
ledger's lines after the state's do not count any more.

    run_state             the master's part of every state
    memory_checkpointer   the state after each step: begun, completed, loaded
    step_end              the end of a step
    beginning             the beginning of a MasterWorker, up to its next step
    run_end               the end of the run: the last checkpoint, books and summary
    run_files             books and summary as files
    checkpoints           the run's checkpoints on disk

`asyncrl.runtime.trials.memory_checkpoint` describes the folder in the host's memory, which the launcher makes and
removes. `asyncrl.trainer.rank.host_folders` decides which state ranks on several hosts load, and
`asyncrl.trainer.trajectories.inbox_store` keeps trajectories.
"""
