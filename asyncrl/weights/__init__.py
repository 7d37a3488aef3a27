"""The weights of a model outside of it: versions for the servers, checkpoints, and the ways from process to process.

    atomic_dir, manifest                     folders that are complete or absent, and the list of their files
    folder_tensors, tensor_file              a model's tensors by their names in a folder; writing a file of them
    publishing, logprob_probe                versions for the servers, and the probe that checks who has loaded one
    loading, adapters, stored, whole_folder  reading them back: all or nothing, merged, written again, tried before
    checkpoint_shards, checkpoints           everything that a run needs to continue
    transports                               the servers' way to a version: by disk or from the trainer's memory

`atomic_dir`, `manifest`, `logprob_probe` and `transports` load no torch when they are imported.
"""
