"""One rank: the trajectories that it receives, its request handlers, roles, published versions and measurements."""
