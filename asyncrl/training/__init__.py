"""The training ranks: models, optimizer, step batches, model functions, weights on disk and checkpoints.

`manifest` and `weights_manifest` and `checkpoint_dir` import no torch; processes without it may use them.
"""
