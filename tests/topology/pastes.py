"""Matrices of nvidia-smi, and what becomes of them on the way through terminals, chats and issues."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import MappingProxyType

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
P2P = """ \tGPU0\tGPU1\tGPU2\tGPU3\t
 GPU0\tX\tOK\tCNS\tGNS\t
 GPU1\tOK\tX\tCNS\tGNS\t
 GPU2\tCNS\tCNS\tX\tNS\t
 GPU3\tGNS\tGNS\tNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""


def server(tabs: bool) -> str:
    """Eight GPUs behind NVSwitches, nine NICs, two NUMA nodes, with a legend of the NICs."""
    gpus, nics = [f"GPU{n}" for n in range(8)], [f"NIC{n}" for n in range(9)]

    def cell(a: str, b: str) -> str:
        if a == b:
            return " X "
        if a[:3] == b[:3] == "GPU":
            return "NV18"
        far = (int(a[3:]) % 8 >= 4) != (int(b[3:]) % 8 >= 4)
        if far:
            return "SYS"
        return "PIX" if a[3:] == b[3:] else "NODE"

    def line(first: str, cells: list[str]) -> str:
        return (
            "\t".join([first, *cells])
            if tabs
            else first.ljust(8) + "".join(c.ljust(8) + " " * 4 * (len(c) > 6) for c in cells)
        )

    names = [*gpus, *nics]
    rows = [line("", [*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for name in names:
        node = int(name[3:]) % 8 // 4
        ends = [("0-47,96-143", "48-95,144-191")[node], str(node), "N/A"] if name in gpus else []
        rows.append(line(name, [*(cell(name, other) for other in names), *ends]))
    legend = "\nNIC Legend:\n\n" + "".join(f"  NIC{n}: mlx5_bond_{n}\n" for n in range(9))
    return "\n".join(rows) + "\n" + LEGEND + legend


def tray() -> str:
    """Four GPUs of an NVL72's tray, as its own system shows them: lists of NUMA nodes, and the GPUs' own."""
    return (
        "\tGPU0\tGPU1\tGPU2\tGPU3\tmlx5_0\tmlx5_3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \tNV18\tNV18\tNV18\tNODE\tSYS\t0-71\t0,2-17\t\t2\n"
        "GPU1\tNV18\t X \tNV18\tNV18\tNODE\tSYS\t0-71\t0,2-17\t\t10\n"
        "GPU2\tNV18\tNV18\t X \tNV18\tSYS\tNODE\t72-143\t1,18-33\t\t18\n"
        "GPU3\tNV18\tNV18\tNV18\t X \tSYS\tNODE\t72-143\t1,18-33\t\t26\n"
        "mlx5_0\tNODE\tNODE\tSYS\tSYS\t X \tSYS\t\t\t\t\n"
        "mlx5_3\tSYS\tSYS\tNODE\tNODE\tSYS\t X \t\t\t\t\n"
    )


def workstation() -> str:
    """Four GPUs, two of them bridged, on one socket with odd lists of CPUs."""
    return (
        "        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA\n"
        "GPU0     X      NV4     PHB     SYS     0,3-9,11-17     0\n"
        "GPU1    NV4      X      PHB     SYS     0,3-9,11-17     0\n"
        "GPU2    PHB     PHB      X      SYS     0,3-9,11-17     0\n"
        "GPU3    SYS     SYS     SYS      X      1-2,10,18-23    1\n"
    )


SOURCES = MappingProxyType(
    {"spaces": server(False), "tabs": server(True), "tray": tray(), "workstation": workstation()}
)


def wrapped(width: int, *, stripped: bool = False) -> Callable[[str], str]:
    """As a terminal of some width breaks lines; ``stripped`` where blanks at the ends are lost in a copy."""

    def change(text: str) -> str:
        lines = []
        for line in text.expandtabs(8).splitlines():
            parts = [line[at : at + width] for at in range(0, len(line), width)] or [""]
            lines += [part.rstrip() for part in parts] if stripped else parts
        return "\n".join(lines) + "\n"

    return change


def markdown_table(text: str) -> str:
    """The matrix as a table of Markdown, with its separating line."""
    rows = [line.expandtabs(8) for line in text.partition("\n\n")[0].splitlines()]
    rows[0] = (
        rows[0]
        .replace("CPU Affinity", "CPU_")
        .replace("NUMA Affinity", "NUMA_")
        .replace("GPU NUMA ID", "ID_")
    )
    cells = [line.split() for line in rows]
    cells[0] = [
        "",
        *(word.replace("_", " Affinity") if word in ("CPU_", "NUMA_") else word for word in cells[0]),
    ]
    cells[0] = ["GPU NUMA ID" if word == "ID_" else word for word in cells[0]]
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]]) + "\n"


def each(change: Callable[[int, str], str]) -> Callable[[str], str]:
    """Changes every line, by its number."""
    return lambda text: "".join(change(n, line) + "\n" for n, line in enumerate(text.splitlines()))


def rows(text: str) -> list[list[str]]:
    """The matrix as words, with headings as one word each."""
    lines = [line.expandtabs(8) for line in text.partition("\n\n")[0].splitlines()]
    for heading in ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID"):
        lines[0] = lines[0].replace(heading, heading.replace(" ", "_"))
    cells = [line.split() for line in lines]
    words = (word.replace("_", " ") if word.endswith(("_Affinity", "_ID")) else word for word in cells[0])
    return [["", *words], *cells[1:]]


def table(before: str, between: str, after: str, rule: str = "") -> Callable[[str], str]:
    """The matrix as a table of some markup, perhaps with a rule below its header."""

    def change(text: str) -> str:
        lines = [before + between.join(line) + after for line in rows(text)]
        return "\n".join([lines[0], *([rule] if rule else []), *lines[1:]]) + "\n"

    return change


CHANGES: MappingProxyType[str, Callable[[str], str]] = MappingProxyType(
    {
        "as it is": lambda text: text,
        "no legend": lambda text: text.partition("\nLegend:")[0],
        "tabs to spaces": lambda text: text.expandtabs(8),
        "single spaces": lambda text: "\n".join(" ".join(line.split()) for line in text.splitlines()),
        "carriage returns": lambda text: text.replace("\n", "\r\n"),
        "two carriage returns": lambda text: text.replace("\n", "\r\r\n"),
        "byte order mark": lambda text: "\ufeff" + text,
        "no-break spaces": lambda text: text.replace(" ", "\u00a0"),
        "zero-width spaces": lambda text: text.replace("\t", "\t\u200b"),
        "quoted": lambda text: "".join(f"> {line}\n" for line in text.splitlines()),
        "quoted twice": lambda text: "".join(f"> >{line}\n" for line in text.splitlines()),
        "fenced": lambda text: f"Here it is:\n```console\n$ nvidia-smi topo -m\n{text}```\nThanks!\n",
        "prompts": lambda text: f"root@node1:~# nvidia-smi topo -m\n{text}root@node1:~# exit\n",
        "indented": lambda text: "".join(f"    {line}\n" for line in text.splitlines()),
        "double-spaced": lambda text: text.replace("\n", "\n\n"),
        "underlined header": lambda text: "\x1b[4m" + text.replace("\n", "\x1b[0m\n", 1),
        "escape lost": lambda text: "[4m" + text.replace("\n", "[0m\n", 1),
        "escape written out": lambda text: "\\x1b[4m" + text.replace("\n", "\\x1b[0m\n", 1),
        "caret notation": lambda text: "^[[4m" + text.replace("\n", "^[[0m\n", 1),
        "colours": lambda text: text.replace("NV18", "\x1b[1;32mNV18\x1b[0m").replace(
            "SYS", "\x1b[31mSYS\x1b[m"
        ),
        "title and bell": lambda text: "\x1b]0;root@node1\x07" + text,
        "after p2p": lambda text: f"$ nvidia-smi topo -p2p r\n{P2P}\n$ nvidia-smi topo -m\n{text}",
        "before p2p": lambda text: f"{text}\n$ nvidia-smi topo -p2p n\n{P2P}",
        "twice": lambda text: f"node1:\n{text}\nnode2:\n{text}",
        "Chinese text": lambda text: (
            f"单机八卡，GPU0 和 GPU1 的拓扑如下：\n\n{text}\n如上所示，跨 NUMA 时走 SYS。\n"
        ),
        "prose": lambda text: (
            f"GPU0 and GPU1 are slow on this box (see NIC0):\n\n{text}\nGPU0 is the culprit.\n"
        ),
        "list of GPUs": lambda text: (
            "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n  MIG 3g.40gb     Device  0: (UUID: MIG-1)\n"
            f"GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)\n\n{text}"
        ),
        "HTML": lambda text: (
            f"<details><summary>topo</summary>\n<pre>\n{text.replace(' ', '&nbsp;')}</pre>\n</details>\n"
        ),
        "Markdown table": markdown_table,
        "cells without a space": lambda text: text.replace("NODE    ", "NODE").replace("PIX     ", "PIX"),
        "headings without a space": lambda text: text.replace("Affinity    NUMA", "AffinityNUMA"),
        "wrapped at 80": wrapped(80),
        "wrapped at 80, blanks lost": wrapped(80, stripped=True),
        "wrapped at 120": wrapped(120),
        "wrapped at 120, blanks lost": wrapped(120, stripped=True),
        "wrapped at 97": wrapped(97),
        "padded": each(lambda n, line: line.ljust(190)),
        "wide tabs": lambda text: text.expandtabs(16),
        "narrow tabs": lambda text: text.expandtabs(4) if "\t" in text else text,
        "stripped": lambda text: text.strip(),
        "log of a pipeline": each(lambda n, line: f"2024-11-05T10:22:{n:02}.1234567Z {line}"),
        "log of a pod": each(lambda n, line: f"[pod/nccl-test-worker-0/main] {line}"),
        "mpirun --tag-output": each(lambda n, line: f"[1,0]<stdout>:{line}"),
        "srun --label": each(lambda n, line: f"0: {line}"),
        "journal": each(lambda n, line: f"Nov 30 17:00:01 node1 bash[4711]: {line}"),
        "numbered": each(lambda n, line: f"{n + 1:6}\t{line}"),
        "added in a diff": each(lambda n, line: f"+{line}"),
        "list": each(lambda n, line: f"- {line}"),
        "starred list": each(lambda n, line: f" * {line}"),
        "Python's logging": each(lambda n, line: f"INFO:root:{line}"),
        "docker compose": each(lambda n, line: f"worker-1  | {line}"),
        "watch": lambda text: f"Every 2.0s: nvidia-smi topo -m      node1: Mon Nov 30\n\n{text}",
        "JIRA": lambda text: f"{{noformat}}\n{text}{{noformat}}\n",
        "fence on the line": lambda text: f"```{text}```",
        "JSON string": lambda text: text.replace("\t", "\\t").replace("\n", "\\n"),
        "Python's bytes": lambda text: "b'" + text.replace("\t", "\\t").replace("\n", "\\n") + "'",
        "form feed": lambda text: "\f" + text.replace("\n\n", "\n\f\n", 1),
        "en dashes": lambda text: text.replace("-", "\u2013"),
        "no-break hyphens": lambda text: text.replace("-", "\u2011"),
        "bold": lambda text: text.replace("GPU0", "**GPU0**"),
        "LaTeX": table("", " & ", r" \\\\", r"\hline"),
        "HTML table": table("<tr><td>", "</td><td>", "</td></tr>"),
        "Org table": table("| ", " | ", " |", "|---+---|"),
        "AsciiDoc": table("|", " |", "", ""),
        "rich table": table("\u2502 ", " \u2502 ", " \u2502", "\u251c\u2500\u2500\u253c\u2500\u2500\u2524"),
        "reStructuredText": table("", "  ", "", "=====  =====  ====="),
        "semicolons": table("", ";", ""),
        "colons after names": each(lambda n, line: line.replace("\t", ":\t", n > 0 and line[:1] != "\t")),
        "wrapped at 53": wrapped(53),
        "wrapped at 104, blanks lost": wrapped(104, stripped=True),
        "wrapped at 164": wrapped(164),
        "lines end in br": lambda text: text.replace("\t", "&nbsp;" * 8).replace("\n", "<br>"),
        "a div a line": each(lambda n, line: f"<div>{line}</div>"),
        "HTML table of paragraphs": table("<table><tr><td><p>", "</p></td><td><p>", "</p><br/></td></tr>"),
        "spreadsheet's HTML": table(
            f'<tr style="height:21px"><td style="{"padding:2px;" * 20}">', "</td><td>", "</td></tr>"
        ),
        "HTML without end tags": table("<tr><td>", "<td>", ""),
        "HTML table, a cell a line": table("<tr>\n <td>", "</td>\n <td>", "</td>\n</tr>"),
        "cells in small letters": lambda text: text if "mlx" in text else text.replace("NV18", "nv18"),
        "small letters": lambda text: text if "mlx" in text else text.partition("\nNIC Legend")[0].lower(),
        "Cyrillic and multiplication sign": lambda text: text.replace("SYS", "SY\u0405").replace(
            "X", "\u00d7"
        ),
        "Arabic digits": lambda text: text.partition("\n\n")[0].translate(
            {ord("0") + n: 0x660 + n for n in range(10)}
        ),
        "escaped twice": lambda text: text.replace(" ", "&amp;nbsp;"),
        "MediaWiki": table("|-\n| ", " || ", ""),
        "header again": lambda text: text.replace("\nGPU2", f"\n{text.splitlines()[0]}\nGPU2", 1),
        "CSV": table('"', '","', '"'),
        "list in Ansible's JSON": lambda text: json.dumps({"stdout_lines": text.splitlines()}, indent=4),
        "list in Python": lambda text: repr(text.splitlines()) if "\t" in text else text,
        "syslog": lambda text: text.replace("\t", "#011"),
        "cat -A": lambda text: text.replace("\t", "^I").replace("\n", "$\n") if "\t" in text else text,
        "line ends of Word": lambda text: text.replace("\n", "\v"),
        "bold of a man page": lambda text: text.replace("GPU0", "G\bGP\bPU\bU0\b0"),
        "full-width letters": lambda text: text.replace("GPU", "\uff27\uff30\uff35"),
        "emoji": lambda text: text.replace("NODE", "NODE\u26a0\ufe0f"),
        "GPU 0": lambda text: text.replace("GPU", "GPU ").replace("GPU  NUMA", "GPU NUMA"),
        "wrapped and quoted": lambda text: "".join(f"> {line}\n" for line in wrapped(80)(text).splitlines()),
    }
)
