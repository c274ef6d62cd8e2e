"""The package as a whole: its names, what importing it costs, and which module may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import networkx as nx
import pytest

import flagcx as fc
from tests.bootstrap.processes import bare_environment
from tests.sources import Module, modules, parsed
from tests.speed import slowness

PUBLIC = [
    "AbortedError",
    "Advice",
    "Algorithm",
    "ArgumentError",
    "ArrayError",
    "BootstrapError",
    "CommunicationError",
    "Communicator",
    "CommunicatorError",
    "Config",
    "FlagcxError",
    "GradientSynchronizer",
    "LaunchError",
    "MismatchError",
    "MissingDependencyError",
    "OperationError",
    "PeerDiedError",
    "PeerTimeoutError",
    "RankError",
    "ResourceError",
    "ScheduleError",
    "Topology",
    "TopologyError",
    "Work",
    "advise",
    "compression",
    "draw",
    "enhance_process_group",
    "from_mpi",
    "get_topology",
    "init",
    "launch",
    "memory_stats",
    "plot_topology",
    "preset",
    "register",
    "restore_process_group",
    "scaled_sum",
    "simulate",
    "unregister",
    "verify",
]

# From the bottom up; a module may import from its own layer and from those before it.
LAYERS = [
    ["errors", "config", "descriptors", "limits", "forks", "daemon", "migration", "_version"],
    ["dtypes", "foreign_arrays", "report", "figure"],
    ["schedule"],
    ["algorithms", "topology", "bootstrap", "memory"],
    ["kernels", "arguments"],
    ["transport"],
    ["diagnosis"],
    ["profiler"],
    ["cost"],
    ["selection", "_launch"],
    ["executor"],
    ["fusion"],
    ["compression"],
    ["communicator"],
    ["world", "gradients"],
    ["interop"],
    ["cli", "__main__"],
]
SIBLINGS = [{"algorithms", "topology"}, {"topology", "bootstrap"}, {"algorithms", "bootstrap"}]
OPTIONAL = {
    "cupy": {"transport", "kernels", "_launch", "cli", "bootstrap", "arguments", "executor", "fusion"},
    "mpi4py": {"bootstrap", "cli", "transport"},
    "ucxx": {"transport"},
    "torch": {"interop"},
    "distributed": {"interop"},
    "ray": {"interop"},
    "networkx": {"topology"},
    "matplotlib": {"cli", "figure", "topology", "schedule", "profiler"},
    "typer": {"cli"},
    "rich": {"cli", "topology", "profiler", "selection", "report", "gradients"},
}


def test_the_public_names():
    assert sorted(fc.__all__) == sorted(PUBLIC)
    assert set(fc._HOMES) == set(PUBLIC)
    for name in PUBLIC:
        assert getattr(fc, name).__doc__, f"fc.{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'allreduce'"):
        fc.allreduce  # noqa: B018
    assert sorted(dir(fc)) == sorted([*PUBLIC, "__version__"])


def test_importing_is_quick_and_light():
    program = """
import sys, time
begin = time.process_time()
import flagcx
took = time.process_time() - begin
heavy = {"cupy", "torch", "mpi4py", "matplotlib", "networkx", "typer", "rich"} & set(sys.modules)
flagcx.init
heavy |= {"cupy", "torch", "mpi4py", "matplotlib", "networkx", "typer", "rich"} & set(sys.modules)
print(took, *sorted(heavy))
"""
    times = []
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        took, *heavy = out.stdout.split()
        times.append(float(took))
        assert not heavy
    assert min(times) < 0.150 * slowness()


HEAVY = {
    *("asyncio", "cupy", "email", "importlib.metadata", "jsonschema", "matplotlib", "mpi4py", "networkx"),
    *("rich", "ssl", "torch", "typer"),
}


@pytest.mark.parametrize(
    ("start", "also"),
    [
        (
            "import flagcx, numpy; flagcx.init().allreduce(numpy.ones(3))",
            {"flagcx.transport.network.crossing", "flagcx.transport.network.steps"},
        ),
        ("import flagcx.cli.run_script", {"numpy", "shutil", "tempfile"}),
    ],
)
def test_a_rank_and_its_launcher_import_nothing_heavy_as_they_start(start, also):
    program = f"{start}; import sys; print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", program], env=bare_environment(), capture_output=True, text=True, check=True
    )
    assert not (HEAVY | also) & set(out.stdout.split())


def _imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _part(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def _level(part: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if part in layer)


def _upward(path: Path, nodes) -> list[str]:
    part = _part(path)
    faults = []
    for name in _imports(nodes):
        if not name.startswith("flagcx."):
            continue
        other = name.split(".")[1]
        if other == part:
            continue
        if _level(other) > _level(part) or {part, other} in SIBLINGS:
            faults.append(f"{path} imports {name}")
    return faults


def test_imports_go_down():
    faults = [fault for one in modules() if str(one.path) != "__init__.py" for fault in _upward(*one[:2])]
    assert not faults, "\n".join(faults)


def test_an_import_that_goes_up_is_found():
    nodes = parsed("from flagcx.communicator import Communicator").imports
    assert _upward(Path("schedule/verify.py"), nodes)
    assert _upward(Path("algorithms/ring.py"), parsed("import flagcx.topology.plan").imports)
    assert not _upward(Path("cli/run.py"), nodes)


def _import_graph(found: Iterable[Module]) -> nx.DiGraph:
    """Which module imports which, when it is loaded, later in a function, or for types alone."""
    imports = {one.name: one.imports for one in found}
    graph = nx.DiGraph()
    for name, nodes in imports.items():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                graph.add_edges_from((name, one if one in imports else node.module) for one in named)
            elif isinstance(node, ast.Import):
                graph.add_edges_from((name, alias.name) for alias in node.names)
    graph.remove_nodes_from([name for name in [*graph] if name not in imports or name == "flagcx"])
    graph.remove_edges_from([*nx.selfloop_edges(graph)])
    return graph


def test_no_module_imports_itself_by_way_of_others():
    cycles = [found for found in nx.strongly_connected_components(_import_graph(modules())) if len(found) > 1]
    assert not cycles, cycles


def test_a_cycle_of_lazy_imports_is_found():
    one = parsed("def f():\n    from flagcx.dtypes import DType", "errors.py")
    other = parsed("if TYPE_CHECKING:\n    from flagcx.errors import FlagcxError", "dtypes.py")
    assert not nx.is_directed_acyclic_graph(_import_graph([one, other]))


def test_files_have_one_idea():
    long = [f"{one.path} has {one.lines} lines" for one in modules() if one.lines > 400]
    assert not long, long


def test_every_module_has_a_layer():
    for one in modules():
        if str(one.path) != "__init__.py":
            _level(_part(one.path))


def test_optional_packages_are_imported_where_they_belong():
    for path, nodes, *_ in modules():
        for name in _imports(nodes):
            allowed = OPTIONAL.get(name.split(".")[0])
            assert allowed is None or _part(path) in allowed, f"{path} imports {name}"


def test_algorithms_import_no_arrays_and_transports_no_algorithm():
    for path, nodes, *_ in modules():
        names = set(_imports(nodes))
        if _part(path) == "algorithms":
            assert not {n for n in names if n.split(".")[0] in ("numpy", "cupy")}, path
        if _part(path) == "transport":
            assert not {n for n in names if n.startswith("flagcx.algorithms")}, path


def test_one_module_reads_the_environment():
    for one in modules():
        if str(one.path) != "config.py":
            for line, name in one.environment:
                raise AssertionError(f"{one.path}:{line} reads os.{name}; take it from flagcx.config")


def test_a_module_that_reads_the_environment_is_found():
    assert parsed("import os\nx = os.environ['HOME']").environment == [(2, "environ")]
    assert not parsed("import os\nx = os.path").environment
