"""The history of a run, from its files: read step by step while it runs, or at once when it is over.

`History` is what `doctor`, `dashboard`, `trace` and the Python API read. It opens files of the run's folder and asks no
process, so it costs the run nothing and works after a crash.
"""

from asyncrl.observe.history.history import History, State
from asyncrl.observe.history.ledger_history import Rollout, StepOf
from asyncrl.observe.history.process_history import Process

__all__ = ["History", "Process", "Rollout", "State", "StepOf"]
