"""Small schedules written by hand, so that tests of this layer lean on no algorithm of the library."""

from __future__ import annotations

from functools import partial

from flagcx.schedule.model import (
    Buffer,
    Copy,
    Program,
    Recv,
    RecvReduce,
    Reduce,
    Schedule,
    Send,
    Step,
    span_of,
)

IN, OUT, TMP = (partial(span_of, buffer) for buffer in Buffer)


def ring_allreduce(n: int) -> Schedule:
    """A ring that reduces straight into OUTPUT."""

    def make(r: int) -> Program:
        left, right = (r - 1) % n, (r + 1) % n
        steps = [Step(local=(Copy(IN(0, n), OUT(0, n)),))]
        for t in range(n - 1):
            a, b = (r - t) % n, (r - t - 1) % n
            steps.append(Step((Send(OUT(a), right), RecvReduce(OUT(b), left))))
        for t in range(n - 1):
            a, b = (r + 1 - t) % n, (r - t) % n
            steps.append(Step((Send(OUT(a), right), Recv(OUT(b), left))))
        return Program(r, tuple(steps))

    return Schedule("allreduce", "ring", n, n, make, aligned=True)


def one_shot(n: int) -> Schedule:
    """Everyone sends all to all and adds up in the order of the ranks."""

    def make(r: int) -> Program:
        others = [q for q in range(n) if q != r]
        transfers = [Send(IN(0), q) for q in others] + [Recv(TMP(q), q) for q in others]
        local = [Copy(IN(0), TMP(r)), Copy(TMP(0), OUT(0))]
        local += [Reduce(TMP(q), OUT(0)) for q in range(1, n)]
        return Program(r, (Step(tuple(transfers), tuple(local)),))

    return Schedule("allreduce", "one_shot", n, 1, make, aligned=True)


def binomial_broadcast(n: int, root: int = 0) -> Schedule:
    """A rank hands on what it has to ever nearer ranks; not aligned, since nobody counts idle steps."""

    def make(r: int) -> Program:
        v = (r - root) % n
        steps = [Step(local=(Copy(IN(0), OUT(0)),))] if v == 0 else []
        low = v & -v if v else 1 << (n - 1).bit_length()
        if v:
            steps.append(Step((Recv(OUT(0), (v - low + root) % n),)))
        mask = low >> 1
        while mask:
            if v + mask < n:
                steps.append(Step((Send(OUT(0), (v + mask + root) % n),)))
            mask >>= 1
        return Program(r, tuple(steps))

    return Schedule("broadcast", "binomial", n, 1, make, root)


def binomial_reduce(n: int, root: int = 0) -> Schedule:
    """The broadcast backwards; a rank's steps are as many as it has children, and one to its parent."""

    def make(r: int) -> Program:
        v = (r - root) % n
        here = OUT(0) if v == 0 else TMP(0)
        steps = [Step(local=(Copy(IN(0), here),))]
        low = v & -v if v else 1 << (n - 1).bit_length()
        mask = 1
        while mask < low:
            if v + mask < n:
                steps.append(Step((RecvReduce(here, (v + mask + root) % n),)))
            mask <<= 1
        if v:
            steps.append(Step((Send(here, (v - low + root) % n),)))
        return Program(r, tuple(steps))

    return Schedule("reduce", "binomial", n, 1, make, root)


def ring_reduce_scatter(n: int, k: int = 1) -> Schedule:
    """Partial sums travel round the ring in SCRATCH; the last comes home to OUTPUT."""

    def make(r: int) -> Program:
        left, right = (r - 1) % n, (r + 1) % n
        steps = [Step(local=(Copy(IN(r * k, k), OUT(0, k)),))]
        for t in range(n - 1):
            a, b = (r - t - 1) % n * k, (r - t - 2) % n * k
            send = Send(TMP(a, k) if t else IN(a, k), right)
            if b == r * k:
                steps.append(Step((send, RecvReduce(OUT(0, k), left))))
            else:
                steps.append(Step((send, Recv(TMP(b, k), left)), (Reduce(IN(b, k), TMP(b, k)),)))
        return Program(r, tuple(steps))

    return Schedule("reduce_scatter", "ring", n, n * k, make, aligned=True)


def ring_allgather(n: int, k: int = 1) -> Schedule:
    """Blocks travel round the ring."""

    def make(r: int) -> Program:
        left, right = (r - 1) % n, (r + 1) % n
        steps = [Step(local=(Copy(IN(0, k), OUT(r * k, k)),))]
        for t in range(n - 1):
            a, b = (r - t) % n * k, (r - t - 1) % n * k
            steps.append(Step((Send(OUT(a, k), right), Recv(OUT(b, k), left))))
        return Program(r, tuple(steps))

    return Schedule("allgather", "ring", n, n * k, make, aligned=True)


def star_gather(n: int, root: int = 0, k: int = 1) -> Schedule:
    """Everyone sends to the root."""

    def make(r: int) -> Program:
        if r != root:
            return Program(r, (Step((Send(IN(0, k), root),)),))
        receives = tuple(Recv(OUT(q * k, k), q) for q in range(n) if q != root)
        return Program(r, (Step(receives, (Copy(IN(0, k), OUT(r * k, k)),)),))

    return Schedule("gather", "star", n, n * k, make, root, aligned=True)


def star_scatter(n: int, root: int = 0, k: int = 1) -> Schedule:
    """The root sends to everyone."""

    def make(r: int) -> Program:
        if r != root:
            return Program(r, (Step((Recv(OUT(0, k), root),)),))
        sends = tuple(Send(IN(q * k, k), q) for q in range(n) if q != root)
        return Program(r, (Step(sends, (Copy(IN(r * k, k), OUT(0, k)),)),))

    return Schedule("scatter", "star", n, n * k, make, root, aligned=True)


def pairwise_alltoall(n: int, k: int = 1) -> Schedule:
    """In step t everyone sends to the rank t further on. INPUT and OUTPUT are never one."""

    def make(r: int) -> Program:
        steps = [Step(local=(Copy(IN(r * k, k), OUT(r * k, k)),))]
        for t in range(1, n):
            to, source = (r + t) % n, (r - t) % n
            steps.append(Step((Send(IN(to * k, k), to), Recv(OUT(source * k, k), source))))
        return Program(r, tuple(steps))

    return Schedule("alltoall", "pairwise", n, n * k, make, aligned=True)


def staged_alltoall(n: int) -> Schedule:
    """All at once, out of one layer of SCRATCH into another, which only serves even blocks."""

    def make(r: int) -> Program:
        others = [q for q in range(n) if q != r]
        transfers = [Send(TMP(q), q) for q in others] + [Recv(TMP(n + q), q) for q in others]
        local = [Copy(TMP(n + q), OUT(q)) for q in others] + [Copy(IN(r), OUT(r))]
        return Program(r, (Step(local=(Copy(IN(0, n), TMP(0, n)),)), Step(tuple(transfers), tuple(local))))

    return Schedule("alltoall", "staged", n, n, make, aligned=True)


def relayed_broadcast(n: int, k: int = 2) -> Schedule:
    """The root sends everything twice; rank 1 hands the second lot on, chunk by chunk, out of SCRATCH."""

    def make(r: int) -> Program:
        if r == 0:
            sends = (Send(IN(0, k), 1), *(Send(IN(c), 1) for c in range(k)))
            steps = [Step(sends, (Copy(IN(0, k), OUT(0, k)),))]
        elif r == 1:
            steps = [Step((Recv(OUT(0, k), 0), *(Recv(TMP(c), 0) for c in range(k))))]
            steps.append(Step(tuple(Send(TMP(c), q) for q in range(2, n) for c in range(k))))
        else:
            steps = [Step(), Step(tuple(Recv(OUT(c), 1) for c in range(k)))]
        return Program(r, tuple(steps))

    return Schedule("broadcast", "relayed", n, k, make, 0)


def dissemination_barrier(n: int) -> Schedule:
    """Everyone hears of everyone in log2 n steps, of some twice."""

    def make(r: int) -> Program:
        steps = [Step(local=(Copy(IN(0), OUT(0)),))]
        distance = 1
        while distance < n:
            steps.append(Step((Send(OUT(0), (r + distance) % n), RecvReduce(OUT(0), (r - distance) % n))))
            distance *= 2
        return Program(r, tuple(steps))

    return Schedule("barrier", "dissemination", n, 1, make, aligned=True)


def two_shot(n: int) -> Schedule:
    """Rank r adds up chunk r of everyone, and sends the sum to everyone."""

    def make(r: int) -> Program:
        others = [q for q in range(n) if q != r]
        gather = [Send(IN(q), q) for q in others] + [Recv(TMP(q * n + r), q) for q in others]
        add = [Copy(IN(r), TMP(r * n + r)), Copy(TMP(r), OUT(r))]
        add += [Reduce(TMP(q * n + r), OUT(r)) for q in range(1, n)]
        share = [Send(OUT(r), q) for q in others] + [Recv(OUT(q), q) for q in others]
        return Program(r, (Step(tuple(gather), tuple(add)), Step(tuple(share))))

    return Schedule("allreduce", "two_shot", n, n, make, aligned=True)


def all_samples(n: int) -> list[Schedule]:
    """Every sample for ``n`` ranks, with each kind of root."""
    roots = sorted({0, n // 2, n - 1})
    rooted = [
        f(n, root) for f in (binomial_broadcast, binomial_reduce, star_gather, star_scatter) for root in roots
    ]
    free = [
        ring_allreduce,
        one_shot,
        two_shot,
        ring_reduce_scatter,
        ring_allgather,
        pairwise_alltoall,
    ]
    return rooted + [f(n) for f in free] + [dissemination_barrier(n)]
