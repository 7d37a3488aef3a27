"""All that the MasterWorker does so that any process may die at any moment. `docs/faults.md` has the user's view.

Who knows what, and who has it after a death:

    fact                                 kept by, beside its owner             read by
    -----------------------------------  ------------------------------------  ----------------------------------------
    weights, moments, random states      hosts' memory: the last step          ranks that begin together
    used prompts, metrics, the step's    every rank, and the last step         a MasterWorker that takes over
      batch, what is to be reported
    trajectories that wait               inboxes, as files                     ranks that begin together
    what became of every rollout         the ledger's file (`recorded`)        a MasterWorker or manager that takes over
    the announced version                name resolution                       everybody
    all of it, of an older step          the newest checkpoint                 the same command, given again

Who dies, and where the run continues (`beginning.find`):

    MasterWorker, between two steps ──▶ the ranks have its state: nothing is loaded
    MasterWorker in a step, or a rank ─▶ all of the trainer's side begins with the last step
    a host that has ranks ────────────▶ the last step is gone: the whole run begins with its newest checkpoint

What is told, in which order (`step_end`), and what a successor does first (`beginning`): a numbered list each. One rule
makes both safe: **nobody outside the trainer's side sees a step before its state is whole.** So a successor knows at
least what others know, and whatever was told already is told again, to receivers that know it by its id or version.

    kept_step   the state after each step: begun, made whole, loaded; what may be told
    recorded    the fold over the ledger's lines
    step_end    what happens once a step is complete
    beginning   where the run stands, and what happens before its next step

`asyncrl.runtime.last_step` has the folder in the host's memory, which the launcher makes and removes,
`asyncrl.trainer.host_folders` says which state ranks on several hosts take, and `asyncrl.trainer.kept_inbox` keeps
trajectories.
"""
