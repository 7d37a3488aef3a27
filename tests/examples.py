"""Numbers of examples of properties: a third in the suite, all of them with ASYNCRL_EVERY_CASE=1.

What a property is about is seen within a few dozen; the rest looks for what nobody thought of.
"""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """How many of `count` examples are tried."""
    return count if os.environ.get("ASYNCRL_EVERY_CASE") else -(-count // 3)
