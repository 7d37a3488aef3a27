"""What torch says about things that are meant here, and users need not read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGER = logging.getLogger("torch.distributed.tensor._redistribute")
_BEGINS = "While redistributing from"


@contextmanager
def several_collectives_expected() -> Iterator[None]:
    """Within it torch does not warn that bringing a tensor of two mesh dimensions together takes two collectives.

    One of both dimensions at once would need a flattened mesh; a norm is one number, and a whole tensor is asked for
    when weights are published, not in a step.
    """
    _LOGGER.addFilter(_is_other)
    try:
        yield
    finally:
        _LOGGER.removeFilter(_is_other)


def _is_other(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_BEGINS)
