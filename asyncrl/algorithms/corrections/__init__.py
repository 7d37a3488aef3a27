"""Off-policy corrections: `(CorrectionInputs, *, params) -> CorrectionOutput`, a weight and a keep mask per token."""
