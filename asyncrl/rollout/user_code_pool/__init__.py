"""Users' code off the worker's event loop, with limits of its own; its failure costs a sample, never the worker.

Three places, by what the code is (`asyncrl.api.RunIn`):

- The user's `async def` code runs on its own event loop, in a thread (`threads.UserLoop`): code that blocks there stops
  other `async def` code of the user and is named in the log, but no lease, heart-beat or answer of the worker's.
- A plain `def` runs in a thread (`threads`), as many at a time as `rollout.user_code.threads` says. At its time limit
  it is abandoned: Python cannot end a thread.
- What is marked so or set so runs in a process (`processes`): killed at its time limit with all it started, limited
  in memory and number of processes, renewed after so many calls.

`runner` joins the three: one call of a named piece of code, timed, limited, its failure told as `UserCodeError`.
"""
