"""Mutated topology files: each must be read or refused in one clear line within 5 seconds.

python -m tests.topology.mutants 20000          # the first 20,000; prints how many were read
python -m tests.topology.mutants 5000 60000     # those from 60,000 on
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from flagcx.errors import TopologyError
from flagcx.topology import Topology, nccl_xml_write, preset, read
from tests.topology.machines import FIXTURES
from tests.topology.pastes import CHANGES, SOURCES

XML = sorted(FIXTURES.glob("*.xml"))
TEXT = sorted(FIXTURES.glob("*.txt"))
#: What is mutated: files of both kinds, large ones too, and matrices as people paste them.
ORIGINALS = tuple(path.read_text() for path in XML + TEXT) + tuple(SOURCES.values())
ORIGINALS += tuple(nccl_xml_write.format_xml(preset(name)) for name in ("dgx-2", "gb200-nvl72", "8xmi250x"))


def mutant(number: int) -> bytes:
    """The mutant of a number: a file, perhaps changed as a paste, cut and swapped, with bytes flipped."""
    rng = random.Random(number)
    text = rng.choice(ORIGINALS)
    if rng.random() < 0.4 and not text.startswith("<"):
        text = CHANGES[rng.choice(list(CHANGES))](text)
    if "<system" in text and rng.random() < 0.6:
        return misstated(text, rng).encode()
    if rng.random() < 0.8:
        text = mangled(text, rng)
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(rng.choice((0, 0, 0, 1, 3, 20)) if data else 0):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def read_mutants(path: Path, numbers: Iterable[int]) -> tuple[int, int]:
    """How many mutants were read and how many refused; anything else than one clear line in 5 s fails."""
    counts = [0, 0]
    for number in numbers:
        path.write_bytes(mutant(number))
        start = time.process_time()
        try:
            machine = read(path)
            assert isinstance(machine, Topology)
            counts[0] += 1
        except TopologyError as error:
            message = str(error)
            assert message.startswith(str(path)) and "\n" not in message and len(message) < 1000, (
                number,
                message,
            )
            counts[1] += 1
        except Exception as error:
            raise AssertionError(f"mutant {number}: {error!r}") from error
        assert time.process_time() - start < 5, number
    return counts[0], counts[1]


VALUES = [
    "",
    "-1",
    "0",
    "1e309",
    "nan",
    "99999999999999999999",
    "０１",
    "x",
    "0x12",
    "1.5",
    "\u0660",
    "18",
    "GT/s",
]


def misstated(text: str, rng: random.Random) -> str:
    """XML that stays well-formed: attributes with each other's or senseless values, or with other names."""
    parts = text.split('"')
    values = range(1, len(parts) - 1, 2)
    for _ in range(rng.randint(1, 8)):
        place = rng.choice(values)
        if rng.random() < 0.5:
            parts[place] = parts[rng.choice(values)]
        else:
            parts[place] = rng.choice(VALUES)
        if rng.random() < 0.2:
            before, _, name = parts[place - 1].rpartition(" ")
            parts[place - 1] = f"{before} {rng.choice(('x', 'y', 'z'))}{name}"
    text = '"'.join(parts)
    if rng.random() < 0.3:
        old, new = rng.sample(("pci", "gpu", "nic", "net", "nvlink", "cpu", "c2c"), 2)
        text = text.replace(f"<{old} ", f"<{new} ").replace(f"</{old}>", f"</{new}>")
    return text


def mangled(text: str, rng: random.Random) -> str:
    """A few cuts, repeats, swaps and changed values."""
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(5)
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        if kind == 0:
            text = text[:b]
        elif kind == 1:
            text = text[:a] + text[b:]
        elif kind == 2:
            text = text[:b] + text[a : min(b, a + 300)] + text[b:]
        elif kind == 3:
            parts = text.split('"')
            if len(parts) > 2:
                parts[rng.randrange(1, len(parts), 2)] = rng.choice(VALUES)
            text = '"'.join(parts)
        else:
            words = text.split(" ")
            words[rng.randrange(len(words))] = rng.choice(("NV3", "SYS", "X", "GPU1", "NV999", "PIX", "<pci"))
            text = " ".join(words)
    return text


def main() -> None:
    """Reads as many mutants as the command line says, from the first or from a number on."""
    count, first, start = int(sys.argv[1]), int(*sys.argv[2:3]), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        passed, refused = read_mutants(Path(folder) / "mutant", range(first, first + count))
    print(
        f"{count} mutants from {first}: {passed} read, {refused} refused, in {time.monotonic() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
