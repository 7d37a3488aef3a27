"""The choice of what a step trains: collected rollouts, the sample buffer, the batch and its plan."""
