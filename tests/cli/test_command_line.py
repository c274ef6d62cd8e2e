"""The command line as a whole: ``python -m flagcx``, and completion in a shell."""

from __future__ import annotations

import subprocess
import sys

import pytest

import flagcx as fc
from flagcx.cli import COMMANDS, application
from tests.bootstrap.processes import bare_environment

COMPLETED = """
import sys
sys.argv = ["flagcx"]
from flagcx.cli import main
main()
"""


def test_python_m_flagcx_is_flagcx():
    command = [sys.executable, "-m", "flagcx", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, env=bare_environment(), timeout=60)
    assert ended.stdout == f"flagcx {fc.__version__}\n"


def test_help_is_broken_where_the_terminal_ends():
    (tune,) = application("tune").registered_commands
    first, second = tune.help.split("\n\n")
    assert first.startswith("Measure all algorithms") and "\n" not in tune.help.replace("\n\n", "")
    assert "and loaded by fc.init(), or with --gpu" in second


@pytest.mark.parametrize(
    ("words", "expected"), [("flagcx ", set(COMMANDS)), ("flagcx topo --pre", {"--preset"})]
)
def test_a_shell_completes_commands_and_options(words, expected):
    asked = {"_FLAGCX_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-c", COMPLETED]
    environ = bare_environment() | asked
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)
    assert set(ended.stdout.split()) == expected, ended.stderr
