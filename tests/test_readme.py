"""The README: its snippets and commands run, its links lead somewhere, and it stays short.

Snippets go on from each other in one session, as a newcomer pastes them. One that begins with a command is
the script that the command names; one with CuPy needs a GPU. A command runs here, or ``ELSEWHERE`` names the
file that runs it.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bootstrap.processes import bare_environment
from tests.ranges import exhaustive

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MOST_LINES = 250
PROGRAMS = ("flagcx", "python", "pip", "pytest", "torchrun", "mpirun", "srun", "sudo")
LAUNCHED = re.compile(r"# ((?:flagcx run|torchrun|mpirun) .*script\.py)\n")

# Commands that take long, need another machine or stand for a kind, and the file that runs them.
ELSEWHERE = {
    "pip install '.[examples]' && flagcx run -n 4 examples/train_digits.py": (
        "tests/examples/test_train_digits.py"
    ),
    "flagcx run -n 4 examples/train_digits.py": "tests/examples/test_train_digits.py",
    "flagcx run -n 8 --share-gpu examples/train_digits.py": "tests/gpu/test_readme.py",
    "pip install -e '.[test]' && pytest": ".ci/run",
    "pytest --all": ".ci/run",
    "pytest -m gpu": "tests/gpu/conftest.py",
    "python bench/several_gpus.py --out new.jsonl": "tests/bench/test_bench_several_gpus.py",
    "python bench/compare_host.py": "tests/bench/test_bench_compare_host.py",
    "flagcx doctor": "tests/cli/test_doctor.py",
    "flagcx doctor FILE.json": "tests/diagnosis/test_page_and_record.py",
    "flagcx status": "tests/diagnosis/test_page_and_record.py",
    "flagcx status JOB": "tests/diagnosis/test_page_and_record.py",
    "flagcx tune": "tests/cli/test_tune.py",
    "flagcx tune -n 4": "tests/cli/test_tune.py",
    "flagcx run": "tests/cli/test_run.py",
    "flagcx run -n 4 script.py [arguments]": "tests/cli/test_run.py",
    "flagcx run --hosts a:4,b:4 script.py": "tests/cli/test_run_hosts.py",
    "flagcx bench allreduce -n 2 -b 1K -e 4M --compare gloo,mpi --plot out.png": "tests/cli/test_bench.py",
    "mpirun -n 4 python script.py": "tests/bootstrap/test_rendezvous.py",
    "srun python script.py": "tests/bootstrap/test_environment.py",
    "torchrun --nproc-per-node 4 script.py": "tests/bootstrap/test_environment.py",
    "python script.py": "tests/bootstrap/test_environment.py",
    "flagcx run -n 4 --elastic --min-ranks 2 script.py": "tests/examples/test_elastic_training.py",
    "torchrun --nproc-per-node 2 examples/tensor_parallel_decode.py --small": (
        "tests/examples/test_tensor_parallel_decode.py"
    ),
    "python -m tests.faults --faults 1000 --seed 1": "tests/faults/test_suite.py",
}

# Commands that run here with less to do.
SMALLER = {"python bench/simulate_scale.py": "python bench/simulate_scale.py --ranks 1000"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the README on which it begins."""

    language: str
    text: str
    line: int


def blocks() -> list[Block]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2], README[: m.start()].count("\n") + 2) for m in found]


def commands() -> list[str]:
    """Every command of the page: the lines of blocks without a language, and those within sentences."""
    lines = [line for block in blocks() if not block.language for line in block.text.splitlines()]
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    # A command may be broken over two lines of a paragraph.
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    bare = [re.split(r"\s+# ", line)[0].strip() for line in lines]
    return sorted({line for line in bare if line.split(" ")[0] in PROGRAMS and line not in PROGRAMS})


def session(*left_out: str) -> str:
    """The snippets that go on from each other, but for those with one of the given words."""
    own = [b.text for b in blocks() if b.language == "python" and not LAUNCHED.match(b.text)]
    return "".join(text for text in own if not any(word in text for word in left_out))


def run(arguments: list[str], folder: Path) -> str:
    ran = subprocess.run(
        arguments,
        cwd=folder,
        env=bare_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, f"{arguments}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def in_this_python(command: str) -> list[str]:
    """A command with this Python and this checkout in place of what is installed."""
    program, *rest = shlex.split(command)
    modules = {"flagcx": ["-m", "flagcx.cli"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
    return [sys.executable, *modules[program], *rest]


def test_it_is_short():
    assert len(README.splitlines()) <= MOST_LINES


def test_every_link_leads_to_a_file():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_path_exists():
    for path in re.findall(r"\b(?:flagcx|examples|bench|tests)/[\w/]+\.(?:py|md|jsonl|ipynb)", README):
        assert (ROOT / path).exists(), path


def test_every_setting_exists():
    from dataclasses import fields

    from flagcx.config import Config

    known = {f"FLAGCX_{field.name.upper()}" for field in fields(Config)} | {"FLAGCX_STORE_KEY"}
    assert set(re.findall(r"FLAGCX_\w+", README)) <= known


def test_every_extra_exists():
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    named = {
        extra for extras in re.findall(r"(?:flagcx|\.)\[([\w,]+)\]", README) for extra in extras.split(",")
    }
    assert named and named <= set(known), named - set(known)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, *exhaustive([2])])
def test_snippets_go_on_from_each_other(ranks, tmp_path):
    script, launcher = tmp_path / "session.py", ["-m", "flagcx.cli", "run", "-n", str(ranks)]
    script.write_text(session("cupy", *["fc.launch"] * (ranks > 1)))
    run([sys.executable, *(launcher if ranks > 1 else []), str(script)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [b for b in blocks() if LAUNCHED.match(b.text)], ids=lambda b: f"line_{b.line}"
)
def test_scripts_under_their_launcher(block, tmp_path):
    if "import torch" in block.text:
        pytest.importorskip("torch", reason="this snippet needs PyTorch")
    (tmp_path / "script.py").write_text(block.text)
    run(in_this_python(LAUNCHED.match(block.text)[1]), tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("command", [one for one in commands() if one not in ELSEWHERE and one[:4] != "pip "])
def test_command(command, tmp_path):
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    (tmp_path / "examples" / "pictures").mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "torus.py", tmp_path / "examples")
    printed = run(in_this_python(SMALLER.get(command, command)), tmp_path)
    pictures = [word for word in command.split() if word.endswith((".svg", ".png"))]
    assert pictures or printed
    assert all((tmp_path / picture).exists() for picture in pictures)


def test_commands_that_run_elsewhere_do():
    assert set(ELSEWHERE) <= set(commands()), set(ELSEWHERE) - set(commands())
    for command, file in ELSEWHERE.items():
        script = re.search(r"(?:examples|bench)/(\w+)\.py", command)
        assert (script[1] if script else "") in (ROOT / file).read_text(), (command, file)
