"""The decorators that mark an algorithm, and `resolve`, which turns a configured choice into a callable.

The decorators keep no table: `catalog` finds them in the source. They only refuse, at import, a function whose
parameters could not be configured.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from asyncrl.algorithms.catalog import check

F = TypeVar("F", bound=Callable[..., Any])


def _marker(kind: str, positional: int) -> Callable[[str], Callable[[F], F]]:
    def named(name: str) -> Callable[[F], F]:
        def mark(function: F) -> F:
            parameters = inspect.signature(function).parameters.values()
            ordinary = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
            if len(ordinary) != positional:
                raise TypeError(
                    f"{kind} {name!r}: {function.__name__} takes {len(ordinary)} positional arguments, expected "
                    f"{positional}; write its parameters after a bare * so that they can be configured"
                )
            return function

        return mark

    return named


policy_loss = _marker("policy_loss", 1)
"""`@policy_loss("name")` on `(PolicyLossInputs, *, params) -> PolicyLossOutput`."""
correction = _marker("correction", 1)
"""`@correction("name")` on `(CorrectionInputs, *, params) -> CorrectionOutput`."""
advantage = _marker("advantage", 1)
"""`@advantage("name")` on `(AdvantageInputs, *, params) -> AdvantageOutput`."""
kl_estimator = _marker("kl", 1)
"""`@kl_estimator("name")` on `(KLInputs, *, params) -> kl_T`."""
value_loss = _marker("value_loss", 1)
"""`@value_loss("name")` on `(ValueLossInputs, *, params) -> ValueLossOutput`."""
aggregation = _marker("aggregation", 3)
"""`@aggregation("name")` on `(mask_T, seq_ids_T, num_seqs, *, params) -> Aggregation`."""
filter_ = _marker("filter", 1)
"""`@filter_("name")` on `(GroupView, *, params) -> Verdict`."""
shaping = _marker("shaping", 1)
"""`@shaping("name")` on `(GroupView, *, params) -> rewards_S`."""


def resolve(
    kind: str, name: str, params: Mapping[str, Any] | None = None, plugins: Sequence[str] = ()
) -> Callable[..., Any]:
    """The function of `name` with `params` bound. Imports only the module that defines it.

    Raises:
        UnknownAlgorithmError, ValueError: as `catalog.check`.
    """
    entry = check(kind, name, params, plugins)
    function: Callable[..., Any] = vars(importlib.import_module(entry.module))[entry.function]
    return functools.partial(function, **dict(params or {}))
