"""Critic losses: `(ValueLossInputs, *, params) -> ValueLossOutput`."""
