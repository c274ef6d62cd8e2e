"""Gradients: reduced in buckets over all ranks while the rest of them is still being computed.

Gradients may come in any order; the buckets follow that of the first step. ``for name in sync.reduced():``
in place of ``wait`` lets the optimizer begin with the first bucket while others are under way. ``with
sync.accumulate():`` communicates nothing, ``sync.abandon()`` leaves a step; ``compression="int8"`` keeps
error feedback for each bucket. Large gradients are reduced where they lie, best in arrays of
``comm.empty``. Through shared memory with every core at work, overlap would only take cores from the
computation: there buckets wait for ``sync.wait()`` (``overlap=True`` starts them at once all the same).
``flagcx run -n 2 bench/overlap.py`` measures the step (``--throttle 0.1`` on a slow link, ``--gpu`` on
GPUs); ``--trace`` shows it in Perfetto. ``state_dict()`` and ``load_state_dict()`` take what a rank
remembers into a checkpoint, as NumPy arrays (``torch.load`` takes them with ``weights_only=False``): a
training that goes on has the bits of one that went through.
"""

from flagcx.gradients.synchronizer import GradientSynchronizer

__all__ = ["GradientSynchronizer"]
