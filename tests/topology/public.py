"""Machines of public topology files and posts, as facts: what each says, typed anew in a short form.

python -m tests.topology.public FOLDER      # writes them as files, for bench/topology_table.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_AMD = 'arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49"'
_INTEL = 'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207"'


class Machine(NamedTuple):
    """A machine: its text, and the GPUs, NUMA nodes and NICs that its source says it has."""

    source: str
    text: str
    gpus: int
    numa_nodes: int
    nics: int


# -- NCCL's and RCCL's XML


def pci(bus: str, inside: str = "", kind: str = "0x060400", gt: str = "32.0", width: int = 16) -> str:
    head = f'<pci busid="{bus}" class="{kind}" link_speed="{gt} GT/s PCIe" link_width="{width}"'
    return f"{head}>{inside}</pci>" if inside else f"{head}/>"


def net(name: str, mbit: int | str, dev: int = 0) -> str:
    return f'<nic><net name="{name}" dev="{dev}" speed="{mbit}" port="1" guid="0x{dev + 1:x}" gdr="1"/></nic>'


def amd_gpu(dev: int, gcn: str, ends: Iterable[tuple[str, int]]) -> str:
    links = "".join(f'<xgmi target="{bus}" count="{count}" tclass="0x038000"/>' for bus, count in ends)
    return f'<gpu dev="{dev}" sm="90" gcn="{gcn}" rank="{dev}" gdr="1">{links}</gpu>'


def system(cpus: Iterable[tuple[int, str]], facts: str = _AMD, version: int = 1) -> str:
    inside = "".join(f'<cpu numaid="{node}" {facts}>{text}</cpu>' for node, text in cpus)
    return f'<system version="{version}">{inside}</system>'


def azure_ndv2() -> str:
    def gpu(number: int) -> str:
        return pci(f"{number:04x}:00:00.0", kind="0x030200", gt="16")

    nic = pci("0101:00:00.0", kind="0x020700", gt="16")
    halves = "".join(map(gpu, (1, 2, 3, 4))) + nic, "".join(map(gpu, (5, 6, 7, 8)))
    return system(enumerate(halves), _INTEL)


def aws_p5() -> str:
    text = ""
    for dev, bus in enumerate((0x4F, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0)):
        gpu = pci(f"0000:{bus:02x}:00.0", f'<gpu dev="{dev}" sm="90" rank="{dev}" gdr="1"/>', "0x030200")
        nics = "".join(
            pci(
                f"0000:{bus + n:02x}:00.0",
                net(f"rdmap{bus + n}s0", 100000, 4 * dev + n),
                "0x020000",
                "16.0",
                8,
            )
            for n in (1, 2, 3, 4)
        )
        text += pci(f"0000:{dev:02x}:00.0", gpu + nics, gt="16.0")
    return system([(0, text)])


def rccl_8p_950() -> str:
    buses = ["08", "18", "68", "78", "88", "98", "e8", "f9"]

    def board(dev: int) -> str:
        bus, up = buses[dev], int(buses[dev], 16) & 0xF0
        ends = [(f"0000:{other}:00.0", 1) for other in buses if other != bus]
        gpu = pci(f"0000:{bus}:00.0", amd_gpu(dev, "gfx950", ends), "0x120000")
        nic = pci(f"0000:{up + 3:02x}:00.0", net(f"bnxt_re{dev}", 400000, dev), "0x020000")
        return pci(f"0000:{up + 1:02x}:00.0", nic + pci(f"0000:{up + 6:02x}:00.0", gpu))

    return system([(n, "".join(map(board, range(4 * n, 4 * n + 4)))) for n in (0, 1)], version=2)


#: (GPU, GPU, xGMI links) as the file has them.
_16P1H = (
    (0, 1, 1), (0, 3, 4), (0, 4, 2), (1, 2, 4), (1, 3, 1), (1, 6, 1), (2, 3, 1), (2, 7, 2), (3, 5, 1),
    (4, 5, 4), (4, 13, 1), (5, 12, 1), (5, 14, 1), (6, 7, 4), (6, 12, 1), (6, 14, 1), (7, 15, 1),
    (8, 9, 1), (8, 10, 1), (8, 11, 4), (8, 14, 1), (9, 10, 4), (9, 11, 1), (9, 12, 1), (10, 13, 2),
    (11, 15, 2), (12, 13, 4), (14, 15, 4),
)  # fmt: skip


def rccl_16p1h_vm() -> str:
    def gpu(dev: int) -> str:
        ends = [(b if a == dev else a, count) for a, b, count in _16P1H if dev in (a, b)]
        inside = amd_gpu(dev, "910", [(f"{0x1000 + end:04x}:00:00.0", count) for end, count in ends])
        return pci(f"{0x1000 + dev:04x}:00:00.0", inside, "0x038000")

    def nic(number: int) -> str:
        return pci(
            f"{0x2000 + number:04x}:00:00.0", net(f"mlx5_{number}", 200000, number), "0x020700", "16.0"
        )

    nodes = range(4)
    inside = ["".join(map(gpu, range(4 * n, 4 * n + 4))) + nic(2 * n) + nic(2 * n + 1) for n in nodes]
    return system(enumerate(inside), version=2)


def rccl_4p4h() -> str:
    """Sixteen MI100: each bridge is listed once for every GPU below it."""
    text = ""
    for half, (up, bridge) in enumerate((("c1", "c5"), ("e2", "e6"))):
        parts = ""
        for place in range(8):
            dev, group = 8 * half + place, range(8 * half + place // 4 * 4, 8 * half + place // 4 * 4 + 4)
            gpu = amd_gpu(dev, "908", [(f"0001:{0x10 + end:02x}:00.0", 1) for end in group if end != dev])
            nic = pci(f"0002:{0x10 + dev:02x}:00.0", net(f"mlx5_{dev}", 200000, dev), "0x020700", "8")
            parts += pci(
                f"0000:{bridge}:00.0", pci(f"0001:{0x10 + dev:02x}:00.0", gpu, "0x038000", "8") + nic, gt="8"
            )
        text += pci(f"0000:{up}:00.0", parts, gt="16")
    return system([(1, text)], version=2)


def rccl_8p_rome_vm() -> str:
    def gpu(dev: int) -> str:
        ends = [(f"{n + 1:04x}:00:00.0", 1) for n in range(dev // 4 * 4, dev // 4 * 4 + 4) if n != dev]
        return pci(f"{dev + 1:04x}:00:00.0", amd_gpu(dev, "908", ends), "0x038000", "16")

    eth = net("eth0", 100000)
    return system([(n, gpu(2 * n) + gpu(2 * n + 1) + ("" if n else eth)) for n in range(4)], version=2)


def alibaba_8gpu() -> str:
    ups = (("16", "2d", "63", "70"), ("96", "b6", "d6", "e6"))

    def board(up: str, dev: int) -> str:
        first = int(up, 16)
        gpu = pci(f"0000:{first + 5:02x}:00.0", f'<gpu dev="{dev}"/>', "0x030200", "64.0")
        port = f'<nic><net name="mlx5_bond_{dev}" dev="{dev + 4}"/></nic>'
        nic = pci(f"0000:{first + 2:02x}:00.0", port, "0x020000", "64.0")
        return pci(f"0000:{up}:00.0", pci(f"0000:{first + 3:02x}:00.0", gpu, gt="64.0") + nic)

    halves = ["".join(board(up, 4 * n + k) for k, up in enumerate(row)) for n, row in enumerate(ups)]
    ports = "".join(f'<net name="mlx5_{n}" dev="{n - 2}"/>' for n in (2, 3, 4, 5))
    halves[0] += pci("0000:27:00.0", f"<nic>{ports}</nic>", "0x020700", "16.0", 2)
    return system(enumerate(halves), _INTEL)


def modal_8xb200() -> str:
    link = '<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>'

    def half(domain: str, first: int) -> str:
        ports = "".join(
            f'<net name="mlx5_{first + n + 5}" dev="{first + n + 5}" speed="400000" port="{n + 1}"/>'
            for n in range(4)
        )
        gpus = "".join(
            pci(
                f"{domain}:00:0{n + 1}.0", f'<gpu dev="{first + n}" sm="100" gdr="1">{link}</gpu>', "0x030200"
            )
            for n in range(4)
        )
        bridge = f'<pci busid="{domain}:00:00.0" class="0x060000" link_speed="" link_width="0">'
        return f"{bridge}<nic>{ports}</nic></pci>{gpus}"

    return system([(0, half("0002", 0)), (1, half("0003", 4))], _INTEL)


def pair_without_numa() -> str:
    def gpu(dev: int, own: str, other: str) -> str:
        link = f'<nvlink target="0000:{other}:00.0" count="4" tclass="0x030000"/>'
        return pci(f"0000:{own}:00.0", f'<gpu dev="{dev}" sm="86" gdr="1">{link}</gpu>', "0x030000", "16.0")

    return system([(-1, gpu(0, "07", "08") + net("eno1", 10000) + gpu(1, "08", "07"))])


def two_4090() -> str:
    def gpu(dev: int, bus: str) -> str:
        return pci(f"0000:{bus}:00.0", f'<gpu dev="{dev}" sm="89" gdr="0"/>', "0x030000", "16.0")

    nic = pci("0000:02:00.0", net("mlx5_0", 100000), "0x020700", "8.0")
    return system([(3, gpu(0, "01") + nic), (2, gpu(1, "46"))])


# -- nvidia-smi's text


def matrix(cells: Sequence[Sequence[str]], nics: int, further: Callable[[int], str], heading: str) -> str:
    """Rows of GPUs alone, with columns of NICs, in single blanks."""
    names = [f"GPU{n}" for n in range(len(cells))] + [f"NIC{n}" for n in range(nics)]
    rows = [f"GPU{gpu} {' '.join(row)} {further(gpu)}" for gpu, row in enumerate(cells)]
    return "\n".join([" ".join(names) + " " + heading, *rows]) + "\n"


def uniform(cell: str, nics: Callable[[int], list[str]], count: int = 8) -> list[list[str]]:
    return [["X" if a == b else cell for b in range(count)] + nics(a) for a in range(count)]


_HEADING = "CPU Affinity NUMA Affinity GPU NUMA ID"


def dgx_a100_12_nics() -> str:
    """The last four NICs are near no GPU, so on a node of their own."""
    cells = uniform("NV12", lambda g: ["PXB" if n < 8 and n // 2 == g // 2 else "SYS" for n in range(12)])
    cpus = ("48-63,176-191", "16-31,144-159", "112-127,240-255", "80-95,208-223")
    return matrix(cells, 12, lambda g: f"{cpus[g // 2]} {(3, 1, 7, 5)[g // 2]} N/A", _HEADING)


def h100_36_nics() -> str:
    """As it was posted: some cells stand without a blank between them."""
    near = {0: range(8), 2: range(10, 18), 4: range(18, 26), 6: range(26, 34)}

    def nics(gpu: int) -> list[str]:
        half = [0 if n < 18 or n > 33 else 1 for n in range(36)]
        return [
            "PIX" if n in near.get(gpu, ()) else "NODE" if half[n] == gpu // 4 else "SYS" for n in range(36)
        ]

    cpus = ("0-55,112-167", "56-111,168-223")
    text = matrix(uniform("NV18", nics), 36, lambda g: f"{cpus[g // 4]} {g // 4} N/A", _HEADING)
    return f"NVIDIA Topology: \n{text.replace('NODE NODE', 'NODENODE').replace('PIX PIX', 'PIXPIX')}"


def h100_four_nodes() -> str:
    node, of_nic, own = (0, 0, 0, 1, 2, 2, 3, 3), (0, 0, 0, 1, 1, 2, 2, 2, 3), (0, 1, 2, 4, 5, 6, 7, 8)

    def nics(gpu: int) -> list[str]:
        return ["SYS" if of_nic[n] != node[gpu] else "PIX" if own[gpu] == n else "NODE" for n in range(9)]

    def further(gpu: int) -> str:
        first = 24 * node[gpu]
        return f"{first}-{first + 23},{first + 96}-{first + 119} {node[gpu]} N/A"

    return "```txt\n" + matrix(uniform("NV18", nics), 9, further, _HEADING) + "```\n"


def b200_explorer() -> str:
    def nics(gpu: int) -> list[str]:
        return ["SYS" if gpu > 3 else "PIX" if n // 2 == gpu // 2 else "NODE" for n in range(4)]

    return matrix(uniform("NV18", nics), 4, lambda g: "", "")


def pair_with_p2p() -> str:
    p2p = " \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n"
    cells = [["X", "PHB"], ["PHB", "X"]]
    return f"{matrix(cells, 0, lambda g: '0-63 0 N/A', _HEADING)}\n<details><summary>-p2p</summary>\n\n{p2p}"


def six_gpus() -> str:
    cells = [
        [
            "X" if a == b else "PIX" if a // 2 == b // 2 else "SYS" if max(a, b) > 3 else "NODE"
            for b in range(6)
        ]
        for a in range(6)
    ]
    text = matrix(cells, 0, lambda g: f"{('0-23,48-71', '24-47,72-95')[g > 3]} {int(g > 3)} N/A", _HEADING)
    return "\x1b[4m\t" + text.replace("\n", "\x1b[0m\n", 1)


def h100_headed_numa() -> str:
    return matrix(
        uniform("NV18", lambda g: []),
        0,
        lambda g: f"{('0-51', '52-103')[g // 4]} {g // 4}",
        "CPU Affinity NUMA",
    )


_MODELS = "ROCm/rccl tools/topo_expl/models"
MACHINES = {
    "azure_ndv2.xml": Machine("Azure/azhpc-images topology/ndv2-topo.xml", azure_ndv2(), 8, 2, 1),
    "aws_p5.xml": Machine("aws/aws-ofi-nccl topology/p5.48xl-topo.xml", aws_p5(), 8, 1, 32),
    "rccl_8p_950.xml": Machine(f"{_MODELS}/topo_8p_950.xml", rccl_8p_950(), 8, 2, 8),
    "rccl_16p1h_vm.xml": Machine(f"{_MODELS}/topo_16p1h_vm.xml", rccl_16p1h_vm(), 16, 4, 8),
    "rccl_4p4h.xml": Machine(f"{_MODELS}/topo_4p4h.xml", rccl_4p4h(), 16, 1, 16),
    "rccl_8p_rome_vm1.xml": Machine(f"{_MODELS}/topo_8p_rome_vm1.xml", rccl_8p_rome_vm(), 8, 4, 1),
    "alibaba.xml": Machine("alibaba/rtp-llm topo.xml", alibaba_8gpu(), 8, 2, 9),
    "modal_8xb200.xml": Machine("modal-labs/gvisor nccl_topo.xml", modal_8xb200(), 8, 2, 2),
    "2xa6000_no_numa.xml": Machine("cuiboyuan/nccl_miner nccl_topo.xml", pair_without_numa(), 2, 0, 1),
    "2x4090.xml": Machine("yynil/RWKVinLLAMA topo.xml", two_4090(), 2, 2, 1),
    "dgx_a100.txt": Machine("NVIDIA/nccl issue 1505", dgx_a100_12_nics(), 8, 5, 12),
    "8xh100_36_nics.txt": Machine("an environment report of sglang 0.5.5", h100_36_nics(), 8, 2, 36),
    "8xh100_4_nodes.txt": Machine("sgl-project/sglang issue 13973", h100_four_nodes(), 8, 4, 9),
    "b200_explorer.txt": Machine("the-dsvolk.github.io ai-perf B200 explorer", b200_explorer(), 8, 2, 4),
    "2x5090_p2p.txt": Machine("noonghunna/club-3090 issue 1229", pair_with_p2p(), 2, 1, 0),
    "6_gpus.txt": Machine("a fixture of a public Go repository: a host with six GPUs", six_gpus(), 6, 2, 0),
    "dgx_h100.txt": Machine("kubernetes.recipes, DGX H100 nvidia-smi topo", h100_headed_numa(), 8, 2, 0),
}


def main() -> None:
    """Writes the machines to a folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, machine in MACHINES.items():
        (folder / name).write_text(machine.text, encoding="utf-8")


if __name__ == "__main__":
    main()
