"""All-reduces of rows with an epilogue: what stands around an all-reduce in tensor-parallel inference.

A layer that is split over the ranks ends in an all-reduce, after which each rank adds the residual and
normalises the rows. On GPUs whose ranks reach each other's memory all of that is one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flagcx.arguments import check_algorithm
from flagcx.communicator.caller import Caller, refuse_async
from flagcx.errors import ArgumentError
from flagcx.fusion.group import Pending


def allreduce_rmsnorm(
    comm: Caller,
    x: Any,
    residual: Any = None,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    bias: Any = None,
    out: Any = None,
    residual_out: Any = None,
    quantize: Any = None,
    scale: Any = None,
    scales: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
) -> Any:
    """Adds up the rows of all ranks, adds the residual, and normalises each row by its root mean square.

    With ``s`` for the sum plus ``bias`` and ``residual``, in float32, a row of the result is
    ``s / sqrt(mean(s * s) + eps) * weight``, rounded once.

    Args:
        x: Array of shape (..., columns) in float16, bfloat16 or float32, the same shape on every rank.
            Left as it is, unless it is ``out``.
        residual: Array of the shape of ``x``, the same values on every rank; replaced by ``s`` unless there
            is ``residual_out``. None for none.
        weight: Array of one value for each column; 1 where it is None.
        eps: What is added to the mean of the squares.
        bias: Array of one value for each column, that is added to the sum once; None for none.
        out: Array for the result; a new one where it is None.
        residual_out: Array for ``s``, which then leaves ``residual`` as it is.
        quantize: "int8", "float8_e4m3fn" or "float8_e5m2": the dtype of the result, which is divided by its
            scale first. None for the dtype of ``x``.
        scale: With ``quantize``, an array of one float32: the scale of the whole result. Where it is None,
            each row has the scale by which its largest value becomes the largest of the dtype.
        scales: Array of one float32 for each row, for those scales; a new one where it is None.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``. "one_shot" and "two_shot" are
            one kernel on GPUs, where the rows are not too many.

    Returns:
        The result; with ``quantize`` and without ``scale`` the result and the scales, of shape (..., 1). The
        same bits on every rank. Large messages round the sum once more, as an all-reduce does.

    Raises:
        ArrayError: An array has another shape or dtype, or overlaps another.
        ArgumentError: Arguments that don't fit together.

    Example:
        >>> h = comm.allreduce_rmsnorm(y, residual, norm.weight, 1e-5)  # doctest: +SKIP

    Source: B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.
    """
    return _normalised(
        comm, x, "rmsnorm", residual, bias, quantize, scale, scales,
        {"weight": weight, "eps": eps, "residual_out": residual_out},
        {"out": out, "algorithm": algorithm, "async_op": async_op, "stream": stream},
    )  # fmt: skip


def allreduce_layernorm(
    comm: Caller,
    x: Any,
    residual: Any = None,
    weight: Any = None,
    shift: Any = None,
    eps: float = 1e-5,
    *,
    bias: Any = None,
    out: Any = None,
    residual_out: Any = None,
    quantize: Any = None,
    scale: Any = None,
    scales: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
) -> Any:
    """Adds up the rows of all ranks, adds the residual, and normalises each row by its mean and variance.

    With ``s`` for the sum plus ``bias`` and ``residual``, in float32, a row of the result is
    ``(s - mean(s)) / sqrt(var(s) + eps) * weight + shift``, rounded once.

    Args:
        shift: Array of one value for each column, that is added last (a layer norm's bias); None for none.
        others: See ``allreduce_rmsnorm``.

    Example:
        >>> h = comm.allreduce_layernorm(y, residual, norm.weight, norm.bias)  # doctest: +SKIP

    Source: J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", arXiv:1607.06450.
    """
    return _normalised(
        comm, x, "layernorm", residual, bias, quantize, scale, scales,
        {"weight": weight, "shift": shift, "eps": eps, "residual_out": residual_out},
        {"out": out, "algorithm": algorithm, "async_op": async_op, "stream": stream},
    )  # fmt: skip


def _normalised(
    comm: Caller,
    x: Any,
    norm: str,
    residual: Any,
    bias: Any,
    quantize: Any,
    scale: Any,
    scales: Any,
    given: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """An all-reduce with a norm: the pieces that the arguments ask for."""
    pieces = [norm]
    if residual is not None:
        pieces.insert(0, "residual")
        given |= {"residual": residual}
    elif given.pop("residual_out") is not None:
        raise ArgumentError("residual_out is for the sum with a residual; pass residual too")
    if bias is not None:
        pieces.insert(0, "bias")
        given |= {"bias": bias}
    if quantize is None:
        if scale is not None or scales is not None:
            raise ArgumentError(
                "scale and scales are for a quantised result; pass quantize, such as 'int8', too"
            )
    elif scale is None:
        pieces.append("quantize_rows")
        given |= {"scales": scales}
    else:
        if scales is not None:
            raise ArgumentError("pass scale for the whole result, or scales for its rows, not both")
        pieces.append("quantize")
        given |= {"scale": scale}
    return allreduce_then(comm, x, pieces, dtype=quantize, **options, **given)


def allreduce_then(
    comm: Caller,
    x: Any,
    pieces: Sequence[Any],
    *,
    out: Any = None,
    dtype: Any = None,
    algorithm: str | None = None,
    async_op: bool = False,
    stream: Any = None,
    **given: Any,
) -> Any:
    """Adds up the rows of all ranks, and does something with each of them, in one kernel where that can be.

    Args:
        x: Array of shape (..., columns) in float16, bfloat16 or float32, the same shape on every rank.
        pieces: What is done, in this order: names of ``flagcx.kernels.epilogue.PIECES`` ("bias", "scale",
            "silu_mul", "residual", "rmsnorm", "layernorm", "quantize_rows", "quantize"), or a ``Piece``.
        out: Array for the result; a new one where it is None.
        dtype: The dtype of a quantised result.
        algorithm: See ``Communicator``, likewise ``async_op`` and ``stream``.
        given: The operands and numbers of the pieces, by name: arrays of the shape of ``x`` ("gate",
            "residual"), of one value for each column ("bias", "weight", "shift"), for each row ("scales"), or
            of one value ("scale"); numbers ("eps", "factor"). All ranks must give the same values.

    Returns:
        The result, and the scales that "quantize_rows" has found.

    Raises:
        ArrayError: An array has another shape or dtype, or overlaps another.
        ArgumentError: A piece is not known, or lacks an operand or number.

    Example:
        >>> comm.allreduce_then(x, ("bias", "silu_mul"), bias=b, gate=g)  # doctest: +SKIP
    """
    if stream is not None:

        def again(*_: Any) -> Any:
            options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op}
            return allreduce_then(comm, x, pieces, out=out, dtype=dtype, **options, **given)

        return comm.run_on(stream, again, tuple(a for a in (x, out, *given.values()) if hasattr(a, "shape")))
    from flagcx.communicator.row_arrays import key_of, repeated, row_buffers

    check_algorithm(algorithm)
    if not isinstance(pieces, (list, tuple)):
        raise ArgumentError(f"pieces must be a list of names such as 'rmsnorm', or of Pieces, got {pieces!r}")
    executor, names, key = comm.executor_of(x), tuple(pieces), ()
    if out is not None and comm._group is None and not async_op:
        key = key_of(x, names, out, dtype, algorithm, given)
        found = repeated(executor, key, x, out, given)
        if found is not None:
            executor.run(*found, out)
            return out
    buffers = row_buffers(executor, x, names, out, dtype, given)
    arrays, result, value = buffers.arrays, buffers.out, buffers.value
    if comm._group is not None:
        refuse_async(async_op)
        comm._group.append(Pending(lambda: executor.run(buffers.plan(executor, algorithm), arrays, result)))
        return value
    plan = buffers.plan(executor, algorithm, key)
    return comm.run(executor, plan, arrays, result, value, async_op, "allreduce")
