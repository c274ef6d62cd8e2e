"""A small XML reader for untrusted files: bounded in size, depth and count, and without entities.

Gives plain elements with their line numbers, so that an error can name the place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from xml.parsers import expat

from flagcx.errors import TopologyError

MAX_NBYTES = 8 << 20
MAX_DEPTH = 64
MAX_ELEMENTS = 100_000
_BUS_ID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")
#: By the name in their DOCTYPE, other documents that people have of a machine.
_OTHER_DOCUMENTS = MappingProxyType(
    {
        "nvidia_smi_log": "the output of 'nvidia-smi -q -x', which does not say how GPUs are joined",
        "topology": "hwloc's (lstopo's) XML, which does not say how GPUs are joined",
        "html": "a page of HTML without the table of 'nvidia-smi topo -m'",
    }
)
_WHAT = "a topology (NCCL's XML, or the output of nvidia-smi topo -m)"
#: Bytes that no text has.
_BINARY = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")
#: As C's strtol reads them in any base, which NCCL does.
_WHOLE = re.compile(r"-?(?:0x[0-9a-f]{1,15}|[0-9]{1,18})", re.ASCII | re.IGNORECASE)


@dataclass(slots=True)
class Element:
    """One element: its tag, attributes, the file and line it began in, and its children in order."""

    tag: str
    attributes: dict[str, str]
    source: str
    line: int
    children: list[Element] = field(default_factory=list)

    def error(self, text: str) -> TopologyError:
        """An error that names the element's place."""
        return TopologyError(f"{self.source}, line {self.line}: {text}")

    def number(self, name: str, least: int, most: int) -> int | None:
        """A whole number among the attributes, in a range; None where it is missing or makes no sense."""
        text = self.attributes.get(name, "")
        if not _WHOLE.fullmatch(text):
            return None
        value = int(text, 16 if "x" in text.lower() else 10)
        return value if least <= value <= most else None

    def address(self, name: str) -> str:
        """A PCI address among the attributes, as ``0000:1b:00.0``; "" where there is none."""
        match = _BUS_ID.fullmatch(self.attributes.get(name, "").strip().lower())
        return f"{int(match[1] or '0', 16):04x}:{match[2]}" if match else ""

    def shown(self, name: str) -> str:
        """An attribute as a note shows it: its text and its place."""
        text = self.attributes.get(name)
        return f"{name} is {'missing' if text is None else repr(text[:40])} in line {self.line}"


def read_text(path: str | Path) -> str:
    """The text of a file of bounded size, in UTF-8 or, as Windows redirects output, UTF-16.

    Of a text in another encoding, such as that of a German or Chinese Windows, what is ASCII is right.

    Args:
        path: The file.

    Raises:
        TopologyError: It cannot be opened, is too large, or is no text.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_NBYTES + 1)
    except OSError as error:
        raise TopologyError(f"{path}: cannot be opened as {_WHAT}: {error.strerror or error}") from None
    if len(data) > MAX_NBYTES:
        raise TopologyError(f"{path}: over {MAX_NBYTES >> 20} MiB, which is too large for {_WHAT}")
    encoding = _encoding(data[:4])
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding == "utf-8-sig" and not _BINARY.search(data):
            return data.decode("latin-1")
        name = encoding[:6].upper().rstrip("-")
        raise TopologyError(f"{path}: byte {error.start} is not {name}; expected {_WHAT}") from None


def _encoding(first: bytes) -> str:
    """The encoding of a text by its first bytes: UTF-16 by its mark, or by the zeros of ASCII in it."""
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    if len(first) == 4 and first[1] == first[3] == 0 != first[0]:
        return "utf-16-le"
    if len(first) == 4 and first[0] == first[2] == 0 != first[1]:
        return "utf-16-be"
    return "utf-8-sig"


def parse(text: str, source: str) -> Element:
    """Parses XML to its root element.

    Args:
        text: The document.
        source: Its file name, for messages.

    Raises:
        TopologyError: It is not well formed, too large or too deep, or has a DOCTYPE (and so perhaps
            entities, which are never expanded).
    """
    if len(text) > MAX_NBYTES:
        raise TopologyError(f"{source}: over {MAX_NBYTES >> 20} MiB, which is too large for a topology")
    builder = _Builder(source)
    try:
        builder.parser.Parse(text.encode("utf-8", "surrogatepass"), True)
    except expat.ExpatError as error:
        raise TopologyError(
            f"{source}, line {error.lineno}, column {error.offset + 1}: not well-formed XML: "
            f"{expat.ErrorString(error.code)}; is the file cut short or not XML?"
        ) from None
    return builder.root


class _Builder:
    """Collects elements from expat's callbacks."""

    root: Element

    def __init__(self, source: str) -> None:
        self.source = source
        self.open: list[Element] = []
        self.count = 0
        self.parser = expat.ParserCreate("utf-8")
        self.parser.StartElementHandler = self.start
        self.parser.EndElementHandler = lambda tag: self.open.pop()
        self.parser.StartDoctypeDeclHandler = self.refuse
        self.parser.EntityDeclHandler = self.refuse

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        line = self.parser.CurrentLineNumber
        self.count += 1
        if self.count > MAX_ELEMENTS:
            raise TopologyError(f"{self.source}, line {line}: over {MAX_ELEMENTS} elements; refused")
        if len(self.open) >= MAX_DEPTH:
            raise TopologyError(f"{self.source}, line {line}: nested over {MAX_DEPTH} levels deep; refused")
        element = Element(tag, attributes, self.source, line)
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def refuse(self, name: str, *declaration: object) -> None:
        line = self.parser.CurrentLineNumber
        if name in _OTHER_DOCUMENTS:
            raise TopologyError(
                f"{self.source}, line {line}: this is {_OTHER_DOCUMENTS[name]}; expected NCCL's topology "
                "XML, as NCCL_TOPO_DUMP_FILE writes"
            )
        raise TopologyError(
            f"{self.source}, line {line}: has a DOCTYPE or an entity declaration; topology files need none, "
            "and they are refused because entities can grow without bound"
        )
