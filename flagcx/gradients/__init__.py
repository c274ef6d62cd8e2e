"""Gradients: reduced in buckets over all ranks while the rest of them is still being computed."""

from flagcx.gradients.synchronizer import GradientSynchronizer

__all__ = ["GradientSynchronizer"]
