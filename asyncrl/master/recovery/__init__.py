"""Recovery of the MasterWorker: any process may die at any moment. `docs/faults.md` has the user's view, with the
picture of both sides; `asyncrl.manager.rollouts.rebuild` has the GserverManager's.

Facts, and where they survive a death:

    fact                                 kept by, besides its owner            read by
    -----------------------------------  ------------------------------------  ----------------------------------------
    weights, moments, random states      hosts' memory: the last step          ranks that begin together
    used prompts, metrics, the step's    every rank, and the last step         a MasterWorker that takes over
      batch, what is to be reported
    trajectories that wait               inboxes, as files                     ranks that begin together
    the fate of every rollout            the ledger's file (`recorded`)        a MasterWorker or manager that takes over
    running rollouts                     their RolloutWorkers                  a manager that takes over
    the announced version                name resolution                       everybody
    all of these, as of an older step    the newest checkpoint                 the same command, given again

Deaths, and where the run continues (`beginning.find`):

    MasterWorker, between two steps ──▶ the ranks have its state: nothing is loaded
    MasterWorker in a step, or a rank ─▶ the whole trainer resumes from the last step
    a host that has ranks ────────────▶ the last step is gone: the whole run begins with its newest checkpoint

`step_end` lists the reports about a step in their order, `beginning` the first actions of a successor. One rule makes
both safe: **no process outside the trainer sees a step before its state is complete.** So a successor knows at least as
much as the others. Reports that were sent already are sent again; receivers recognise them by id or version.

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
