"""Recovery of the brain (MasterWorker, GserverManager, all ModelWorkers), whose processes restart together after any
death. `docs/faults.md` has the user's view, with a picture; `asyncrl.manager.rollouts.rebuild` has the manager's side.

Facts, and where they survive a death:

    fact                                 kept by, besides its owner            read by
    -----------------------------------  ------------------------------------  ----------------------------------------
    weights, moments, random states      hosts' memory: the last step          the new ranks
    used prompts, metrics, the step's    hosts' memory: the last step          the new MasterWorker
      batch, what is to be reported
    trajectories that wait               inboxes, as files                     the new ranks
    the fate of every rollout            the ledger's file (`recorded`)        the new MasterWorker, for itself and the
                                                                                 new manager
    running rollouts                     their RolloutWorkers                  the new manager
    the announced version                name resolution                       everybody
    all of these, as of an older step    the newest checkpoint                 a new launch, or a restart of everything

The run continues after the last step (`beginning.find`). If that is not in the hosts' memory (`replay`, a lost host,
`checkpoint.in_memory=false`), the whole run begins again with its newest checkpoint.

`step_end` lists the reports about a step in their order, `beginning` the first actions of a new MasterWorker. One rule
makes both safe: **no process outside the brain sees a step before its state is complete.** So a new brain knows at
least as much as the others. Reports that were sent already are sent again; receivers recognise them by id or version.

    run_state             the master's part of every state
    memory_checkpointer   the state after each step: begun, completed, loaded; what may be reported
    recorded              the state that the ledger's lines add up to
    step_end              the end of a step
    beginning             the beginning of a MasterWorker, up to its next step
    run_end               the end of the run: the last checkpoint, books and summary
    checkpoints           the run's checkpoints on disk

`asyncrl.runtime.trials.memory_checkpoint` describes the folder in the host's memory, which the launcher makes and
removes. `asyncrl.trainer.rank.host_folders` decides which state ranks on several hosts load, and
`asyncrl.trainer.trajectories.inbox_store` keeps trajectories.
"""
