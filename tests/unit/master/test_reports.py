"""The MasterWorker's reports to the GserverManager, without processes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from asyncrl.comm.ledger_lines import PromptGoes
from asyncrl.manager.messages import GateBooks
from asyncrl.master.books.reports import Reports
from asyncrl.master.data.buffer import SampleBuffer
from asyncrl.master.settings import OnStale
from asyncrl.plugins.datasets.queue.curriculum import Curriculum
from tests.unit.master.test_recorded import admitted, dropped, fold, trained


def test_a_master_that_takes_over_has_the_books_that_the_ledgers_lines_add_up_to() -> None:
    """A checkpoint's `saved` line has them: those of the step that it continues from are older."""
    none = cast(Any, None)
    buffer = SampleBuffer(2, 1, OnStale.drop)
    reports = Reports(none, none, buffer, none, Curriculum(0.0, 1.0, 1), none, asyncio.Event(), 1.0)
    reports.restore(2, {}, Curriculum(0.0, 1.0, 1))
    given_up = dropped(3, "failed", PromptGoes.given_up)
    recorded = fold(*map(admitted, range(4)), trained(0), trained(1), given_up)
    reports.continue_after(recorded)
    assert reports.reported_books == GateBooks(4, 2, {"failed": 1}, 0, 1, 0)
    assert set(buffer.used) == {"e0-0", "e0-1", "e0-3"}
