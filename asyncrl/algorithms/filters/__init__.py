"""Group filters: `(GroupView, *, params) -> Verdict`. numpy only: RolloutWorkers run them."""
