"""Reward shaping: `(GroupView, *, params) -> rewards_S`. numpy only: RolloutWorkers run them."""
