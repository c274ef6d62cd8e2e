"""Sets of CPUs as ranges, as the kernel and nvidia-smi write them, and as NCCL's mask."""

from __future__ import annotations

import re


def cpu_mask(ranges: str) -> str:
    """CPU numbers as NCCL's mask in hexadecimal words, from ranges; "" where they are none.

    Example:
        >>> cpu_mask("0-3,32")
        '00000001,0000000f'
    """
    bits = 0
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        if match is None:
            return ""
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        bits |= (1 << last + 1) - (1 << first) if last >= first else 0
    words = [f"{bits >> 32 * word & 0xFFFFFFFF:08x}" for word in range((bits.bit_length() + 31) // 32 or 1)]
    return ",".join(reversed(words))


def cpu_ranges(mask: str) -> str:
    """CPU numbers as ranges, from NCCL's mask in hexadecimal words; "" where it is no mask.

    Example:
        >>> cpu_ranges("00000001,0000000f")
        '0-3,32'
    """
    words = mask.split(",")
    if len(words) > 256 or not all(re.fullmatch(r"[0-9a-fA-F]{1,8}", word) for word in words):
        return ""
    bits = 0
    for word in words:
        bits = bits << 32 | int(word, 16)
    spans: list[list[int]] = []
    for number in (number for number in range(bits.bit_length()) if bits >> number & 1):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)
