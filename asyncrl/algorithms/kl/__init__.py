"""KL estimators: `(KLInputs) -> kl_T`, the divergence of the current policy from the reference, per token."""
