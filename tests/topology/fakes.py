"""A /sys and an NVML that behave like the real ones, errors included."""

from __future__ import annotations

from pathlib import Path


class FakeSys:
    """Builds a sysfs and a procfs below a folder."""

    def __init__(self, folder: Path) -> None:
        self.sys, self.proc = folder / "sys", folder / "proc"
        self.write(
            self.proc / "cpuinfo",
            "processor : 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n",
        )
        (self.sys / "bus/pci/devices").mkdir(parents=True)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def numa(self, number: int, cpus: str, package: int) -> None:
        self.write(self.sys / f"devices/system/node/node{number}/cpulist", cpus + "\n")
        first = cpus.split("-")[0]
        self.write(self.sys / f"devices/system/cpu/cpu{first}/topology/physical_package_id", f"{package}\n")

    def pci(self, way: str, **files: object) -> Path:
        """A PCI function at ``root/bridge/.../address`` with the given files."""
        folder = self.sys / "devices" / way
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            self.write(folder / name, f"{text}\n")
        link = self.sys / "bus/pci/devices" / folder.name
        if not link.exists():
            link.symlink_to(folder)
        return folder

    def bridge(self, way: str, numa: int) -> None:
        fast = {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": 16}
        self.pci(way, **{"class": "0x060400", "vendor": "0x1000", "device": "0xc030"}, numa_node=numa, **fast)

    def gpu(self, way: str, numa: int, vendor: str = "0x10de", pci_class: str = "0x030200") -> None:
        link = {
            "current_link_speed": "2.5 GT/s PCIe",
            "max_link_speed": "32.0 GT/s PCIe",
            "max_link_width": 16,
        }
        self.pci(way, **{"class": pci_class, "vendor": vendor, "device": "0x2330"}, numa_node=numa, **link)

    def infiniband(self, way: str, numa: int, name: str, rate: str, state: str = "4: ACTIVE") -> None:
        link = {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": 16}
        folder = self.pci(
            way, **{"class": "0x020700", "vendor": "0x15b3", "device": "0x1021"}, numa_node=numa, **link
        )
        self.write(folder / f"infiniband/{name}/ports/1/rate", rate + "\n")
        self.write(folder / f"infiniband/{name}/ports/1/state", state + "\n")
        (folder / f"infiniband/{name}/device").symlink_to(folder)
        self.link("class/infiniband", name, folder / f"infiniband/{name}")

    def ethernet(self, way: str, numa: int, name: str, speed: str, bus: str = "") -> None:
        folder = self.pci(
            way, **{"class": "0x020000", "vendor": "0x1af4", "device": "0x1041"}, numa_node=numa
        )
        owner = folder / bus if bus else folder
        self.write(owner / f"net/{name}/speed", speed + "\n")
        (owner / f"net/{name}/device").symlink_to(owner)
        self.link("class/net", name, owner / f"net/{name}")

    def virtual(self, name: str) -> None:
        folder = self.sys / "devices/virtual/net" / name
        self.write(folder / "speed", "10000\n")
        self.link("class/net", name, folder)

    def link(self, place: str, name: str, target: Path) -> None:
        (self.sys / place).mkdir(parents=True, exist_ok=True)
        (self.sys / place / name).symlink_to(target)


class FakeNvml:
    """NVML of some GPUs: what one cannot do raises, as the real one does.

    Args:
        gpus: For each GPU its bus id, name, capability and links: (bus id of the far end, kind), or
            None for a link that is down.
        fails: Names of functions that raise NotSupported.
        driver: Whether there is a driver.
    """

    class NVMLError(Exception):
        """Base of NVML's errors."""

    class NVMLError_NotSupported(NVMLError):
        def __str__(self) -> str:
            return "Not Supported"

    class NVMLError_InvalidArgument(NVMLError):
        def __str__(self) -> str:
            return "Invalid Argument"

    class NVMLError_LibraryNotFound(NVMLError):
        def __str__(self) -> str:
            return "NVML Shared Library Not Found"

    def __init__(self, gpus=(), fails=(), driver=True, links=18):
        self.gpus, self.fails, self.driver = list(gpus), set(fails), driver
        self.NVML_NVLINK_MAX_LINKS = links
        self.open = 0

    def check(self, name):
        if name in self.fails:
            raise self.NVMLError_NotSupported
        if not self.open:
            raise self.NVMLError("Uninitialized")

    def nvmlInit(self):
        if not self.driver:
            raise self.NVMLError_LibraryNotFound
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        self.check("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        self.check("nvmlDeviceGetHandleByIndex")
        if self.gpus[index] is None:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetPciInfo(self, handle):
        self.check("nvmlDeviceGetPciInfo")
        return Info(self.gpus[handle]["bus"])

    def nvmlDeviceGetName(self, handle):
        self.check("nvmlDeviceGetName")
        return self.gpus[handle]["name"]

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        self.check("nvmlDeviceGetCudaComputeCapability")
        return self.gpus[handle]["sm"]

    def far(self, handle, link, name):
        self.check(name)
        links = self.gpus[handle]["links"]
        if link >= len(links):
            raise self.NVMLError_InvalidArgument
        return links[link]

    def nvmlDeviceGetNvLinkState(self, handle, link):
        return 0 if self.far(handle, link, "nvmlDeviceGetNvLinkState") is None else 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        return Info(self.far(handle, link, "nvmlDeviceGetNvLinkRemotePciInfo")[0])

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        return self.far(handle, link, "nvmlDeviceGetNvLinkRemoteDeviceType")[1]


class Info:
    """NVML's structure, of which only the bus id is used."""

    def __init__(self, bus):
        self.busId = bus


def gpu(bus, links=(), sm=(9, 0), name="NVIDIA H100 80GB HBM3"):
    """One GPU for ``FakeNvml``."""
    return {"bus": bus, "name": name, "sm": sm, "links": list(links)}
