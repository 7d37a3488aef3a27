"""Optional: leaders of runs without a trainer, which keep rollouts, or only evaluate."""
