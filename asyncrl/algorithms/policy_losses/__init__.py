"""Policy losses: `(PolicyLossInputs, *, params) -> PolicyLossOutput`, one loss value per token."""
