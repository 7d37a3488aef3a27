"""The sharded engine: one model over data-parallel (FSDP2), tensor- and pipeline-parallel ranks; see `engine`."""
