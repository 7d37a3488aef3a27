"""Run users' code off the worker's event loop, with limits. Its failure costs a sample, never the worker.

There are three places (`asyncrl.api.RunIn`):

- The user's `async def` code runs on a separate event loop, in a thread (`runner.UserLoop`). Code that blocks there
  stops other `async def` code of the user and is named in the log. It does not delay the worker's leases and answers.
- A plain `def` runs in a daemon thread, at most `rollout.user_code.threads` at a time. At its time limit the call
  is abandoned, because Python cannot end a thread.
- Code that is marked or set to `process` runs in a process (`process_pool`). The process and all that it started are
  killed at its time limit. Its memory and its number of processes are limited, and it is replaced after a number of
  calls.

`runner` joins the three: it runs one call of a named piece of code, times and limits it, and reports its failure as
`UserCodeError`.
"""
