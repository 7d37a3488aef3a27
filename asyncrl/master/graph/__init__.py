"""The training step as a graph of calls: the types for a user's graph, and the parts of the built-in ones."""

from asyncrl.master.graph.builtin import POLICY_READS, kl_in_reward, proximal, reference, written
from asyncrl.master.graph.call_graph import BATCH_KEYS, Call, Graph, GraphError

__all__ = [
    "BATCH_KEYS",
    "POLICY_READS",
    "Call",
    "Graph",
    "GraphError",
    "kl_in_reward",
    "proximal",
    "reference",
    "written",
]
