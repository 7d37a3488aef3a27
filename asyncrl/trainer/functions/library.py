"""Imports every module of built-in model functions, so that all are registered."""

from asyncrl.trainer.functions import actor, advantage, critic, inference, reward

__all__ = ["actor", "advantage", "critic", "inference", "reward"]
