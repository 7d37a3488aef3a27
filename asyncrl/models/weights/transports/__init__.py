"""Transports of weights from the trainer to the generation servers: `manager.weight_transport`. Importing this loads no
torch.

A transport is one file here with both of its ends, and one line of `TRANSPORTS`; `base` has the interface.
"""

from __future__ import annotations

TRANSPORTS = {
    "disk": f"{__name__}.disk:DiskTransport",
    "tensor": f"{__name__}.tensor:TensorTransport",
    "distributed": f"{__name__}.distributed:DistributedTransport",
}
"""Import paths of the classes, by the setting's value."""
