"""Advantage estimators: `(AdvantageInputs, *, params) -> AdvantageOutput`."""
