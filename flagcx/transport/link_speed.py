"""The speed of a link between ranks, as a setting names it."""

from __future__ import annotations

from dataclasses import dataclass

from flagcx.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One rank's link to all others: full duplex, and shared by all its messages.

    Attributes:
        bandwidth_gb_per_s: In each direction, in 10^9 bytes per second; 0.0125 is 100 Mbit/s.
        latency_us: Time before the first byte of a step arrives.
    """

    bandwidth_gb_per_s: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth_gb_per_s > 0:
            raise ArgumentError(f"a link needs a bandwidth above 0 GB/s, got {self.bandwidth_gb_per_s!r}")
        if not self.latency_us >= 0:
            raise ArgumentError(f"a link's latency is 0 us or more, got {self.latency_us!r}")

    @classmethod
    def parse(cls, text: str) -> LinkSpeed:
        """Reads ``"0.0125"`` or ``"0.0125,50"``: GB/s, then perhaps us.

        Raises:
            ArgumentError: The text is neither.

        Example:
            >>> LinkSpeed.parse("0.125,50")
            LinkSpeed(bandwidth_gb_per_s=0.125, latency_us=50.0)
        """
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 2:
            raise ArgumentError(
                f"throttle={text!r} is no link; expected GB/s, or GB/s and us of latency, such as "
                f'"0.0125" (100 Mbit/s) or "0.125,50"'
            )
        return cls(*numbers)

    def time_ns(self, nbytes: int, steps: int) -> int:
        """How long ``nbytes`` in the busier direction take, in ``steps`` steps one after the other."""
        return int(nbytes / self.bandwidth_gb_per_s + 1e3 * steps * self.latency_us)
