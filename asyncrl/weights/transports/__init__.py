"""Transports of weights from the trainer to the generation servers: `manager.weight_transport`. Importing this loads no
torch.

A transport has both of its ends in one file here, and one line of `TRANSPORTS`. `base` has the interface, and the
transport by disk.
"""

from __future__ import annotations

TRANSPORTS = {
    "disk": f"{__name__}.base:WeightTransport",
    "tensor": f"{__name__}.from_memory:TensorTransport",
    "distributed": f"{__name__}.distributed:DistributedTransport",
}
"""Import paths of the classes, by the setting's value."""
