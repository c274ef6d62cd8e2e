"""Compression of all-reduces: casts, quantised blocks, top-k, PowerSGD; and error feedback.

=============================  ==========================================  ==============  ================
``compression=``               the codec and its payload                   of dense bytes  error feedback
=============================  ==========================================  ==============  ================
"fp16", "bf16"                 ``Cast``: 16 bits a number                  1/2             not needed
"fp8", "fp8_e5m2"              ``Quantized``: 8 bits, a factor a block     about 1/4       rarely needed
"int8"                         ``Quantized``: 8 bits, a factor a block     about 1/4       rarely needed
"int4"                         ``Quantized``: 4 bits, a factor a block     about 1/8       use it
"topk"                         ``TopK``: the largest, with indices         3-5 x density   needed
"randomk"                      ``RandomK``: some, the same on all ranks    density         needed
"powersgd"                     ``PowerSGD``: two thin factors              r (m + n) / mn  needed
"sparse"                       ``Sparse``: all but zeros; lossless         by the data     nothing to feed
"auto"                         ``Auto``: the fastest; a lossy one only     by the link     where it is lossy
                               if it is allowed
=============================  ==========================================  ==============  ================

A step with infinity or NaN on any rank, or whose sum overflows, is seen on all of them, and leaves error
feedback as it was (which is kept twice for that): in ``GradientSynchronizer`` and DDP's hook that of all
buckets; in a loop of your own ``feedback.undo()`` takes back what the good arrays left. ``auto`` compresses
only where the link is slower than the core or GPU codes, and uses nothing lossy unless told:
``fc.compression.Auto(lossy=("int8",))``. ``auto`` and ``advise`` never take ``randomk``, with which
trainings diverge at the step size of dense gradients. ``topk`` wants a warm-up, and an optimizer with less
momentum and larger steps (``TopK``). On GPUs all stripes of a message are coded, added up and decoded by
one kernel each.

Example:
    >>> comm.allreduce(x, compression="int8")                            # doctest: +SKIP
    >>> feedback = fc.compression.Feedback("topk")                       # doctest: +SKIP
    >>> comm.allreduce(g, "avg", compression=feedback["embedding"])      # doctest: +SKIP
"""

from __future__ import annotations

from flagcx.compression.auto import Decision, LinkProfile
from flagcx.compression.cast import Cast
from flagcx.compression.catalogue import Auto, CodecInfo, catalogue, codec_of
from flagcx.compression.codec import Codec, Payload
from flagcx.compression.feedback import Feedback, as_feedback
from flagcx.compression.powersgd import PowerSGD
from flagcx.compression.quantize import Quantized
from flagcx.compression.slot import Slot
from flagcx.compression.topk import RandomK, Sparse, TopK

__all__ = [
    "Auto",
    "Cast",
    "Codec",
    "CodecInfo",
    "Decision",
    "Feedback",
    "LinkProfile",
    "Payload",
    "PowerSGD",
    "Quantized",
    "RandomK",
    "Slot",
    "Sparse",
    "TopK",
    "as_feedback",
    "catalogue",
    "codec_of",
]
