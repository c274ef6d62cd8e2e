"""The article's benchmark without PyTorch: it says what to install, and still explains itself."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def run(*arguments: str) -> subprocess.CompletedProcess:
    script = ROOT / "examples" / "article_benchmark.py"
    command = [sys.executable, "-c", WITHOUT_TORCH, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_without_torch_it_says_what_to_install():
    ended = run()
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "this benchmark needs PyTorch, which is not installed: pip install 'flagcx[torch]'"
    ]


def test_help_needs_no_torch():
    ended = run("--help")
    assert ended.returncode == 0 and "--elements" in ended.stdout and not ended.stderr
