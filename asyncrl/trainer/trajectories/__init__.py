"""Trajectories of a ModelWorker: their checks on arrival, the inbox in memory, the kept inbox on the host."""
