"""The package as a whole: its names, what importing it costs, and which module may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

import flagcx as fc

PACKAGE = Path(fc.__file__).parent

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
    ["errors", "config", "forks", "daemon", "migration", "_version"],
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
begin = time.perf_counter()
import flagcx
took = time.perf_counter() - begin
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
    assert min(times) < 0.150


def _modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE), ast.parse(path.read_text())


def _imports(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _part(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def _level(part: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if part in layer)


def _upward(path: Path, tree: ast.Module) -> list[str]:
    part = _part(path)
    faults = []
    for name in _imports(tree):
        if not name.startswith("flagcx."):
            continue
        other = name.split(".")[1]
        if other == part:
            continue
        if _level(other) > _level(part) or {part, other} in SIBLINGS:
            faults.append(f"{path} imports {name}")
    return faults


def test_imports_go_down():
    faults = [
        fault for path, tree in _modules() if str(path) != "__init__.py" for fault in _upward(path, tree)
    ]
    assert not faults, "\n".join(faults)


def test_an_import_that_goes_up_is_found():
    tree = ast.parse("from flagcx.communicator import Communicator")
    assert _upward(Path("schedule/verify.py"), tree)
    assert _upward(Path("algorithms/ring.py"), ast.parse("import flagcx.topology.plan"))
    assert not _upward(Path("cli/run.py"), tree)


def _module(path: Path) -> str:
    return ".".join(("flagcx", *path.with_suffix("").parts)).removesuffix(".__init__")


def _import_graph(modules) -> nx.DiGraph:
    """Which module imports which, when it is loaded, later in a function, or for types alone."""
    trees = {_module(path): tree for path, tree in modules}
    graph = nx.DiGraph()
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                found = {f"{node.module}.{alias.name}" for alias in node.names}
                graph.add_edges_from((name, one if one in trees else node.module) for one in found)
            elif isinstance(node, ast.Import):
                graph.add_edges_from((name, alias.name) for alias in node.names)
    graph.remove_nodes_from([name for name in [*graph] if name not in trees or name == "flagcx"])
    graph.remove_edges_from([*nx.selfloop_edges(graph)])
    return graph


def test_no_module_imports_itself_by_way_of_others():
    cycles = [
        found for found in nx.strongly_connected_components(_import_graph(_modules())) if len(found) > 1
    ]
    assert not cycles, cycles


def test_a_cycle_of_lazy_imports_is_found():
    one = ast.parse("def f():\n    from flagcx.dtypes import DType")
    other = ast.parse("if TYPE_CHECKING:\n    from flagcx.errors import FlagcxError")
    graph = _import_graph([(Path("errors.py"), one), (Path("dtypes.py"), other)])
    assert not nx.is_directed_acyclic_graph(graph)


def test_files_have_one_idea():
    long = [
        f"{path} has {lines} lines"
        for path, _ in _modules()
        if (lines := len((PACKAGE / path).read_text().splitlines())) > 400
    ]
    assert not long, long


def test_every_module_has_a_layer():
    for path, _ in _modules():
        if str(path) != "__init__.py":
            _level(_part(path))


def test_optional_packages_are_imported_where_they_belong():
    for path, tree in _modules():
        for name in _imports(tree):
            allowed = OPTIONAL.get(name.split(".")[0])
            assert allowed is None or _part(path) in allowed, f"{path} imports {name}"


def test_algorithms_import_no_arrays_and_transports_no_algorithm():
    for path, tree in _modules():
        names = set(_imports(tree))
        if _part(path) == "algorithms":
            assert not {n for n in names if n.split(".")[0] in ("numpy", "cupy")}, path
        if _part(path) == "transport":
            assert not {n for n in names if n.startswith("flagcx.algorithms")}, path


def test_one_module_reads_the_environment():
    for path, tree in _modules():
        if str(path) == "config.py":
            continue
        for node in ast.walk(tree):
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            if reads and isinstance(node.value, ast.Name) and node.value.id == "os":
                raise AssertionError(f"{path}:{node.lineno} reads os.{node.attr}; take it from flagcx.config")
