"""Asynchronous reinforcement learning of language models: generation never waits for training, training never for
generation."""

__version__ = "0.1.0"
