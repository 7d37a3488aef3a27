"""The demo's reward by a slow judge: a verdict takes 0.1 to 3 s, log-normal with a median of 0.3 s."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from asyncrl.plugins.rewards.arithmetic import arithmetic_reward


async def slow_reward(data: Mapping[str, Any], completion: str) -> float:
    """`arithmetic_reward`, later."""
    await asyncio.sleep(min(3.0, max(0.1, 0.3 * random.lognormvariate(0.0, 1.0))))
    return arithmetic_reward(data, completion)
