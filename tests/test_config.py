"""Settings: names that nothing reads are told, with the name that may have been meant."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import flagcx
from flagcx.config import unknown_settings
from tests.bootstrap.processes import bare_environment


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FLAGCX_TIMEOUT", "FLAGCX_TIMEOUT_S"),
        ("FLAGCX_TIME_OUT_S", "FLAGCX_TIMEOUT_S"),
        ("FLAGCX_timeout_s", "FLAGCX_TIMEOUT_S"),
        ("FLAGCX_INIT_TIMEOUT", "FLAGCX_INIT_TIMEOUT_S"),
        ("FLAGCX_STORE_ADDR", "FLAGCX_STORE_ADDRESS"),
        ("FLAGCX_DETERMINISM", "FLAGCX_DETERMINISTIC"),
        ("FLAGCX_KILL_AFTER", "FLAGCX_KILL_AFTER_S"),
        ("FLAGCX_QQ", None),
    ],
)
def test_an_unknown_setting_is_told_with_the_nearest_name(name, meant):
    (said,) = unknown_settings({name: "5", "PATH": "/bin", "FLAGCX_TIMEOUT_S": "3"})
    assert said.startswith(f"{name}=5 has no effect: there is no such setting; ")
    assert said.endswith(f"do you mean {meant}?" if meant else "fc.Config lists them")


def test_every_variable_that_the_package_names_is_known():
    files = Path(flagcx.__file__).parent.rglob("*.py")
    found = re.compile(r'(?:"|\b)(FLAGCX_[A-Z_]+)(?:"|=)')
    names = {name for file in files for name in found.findall(file.read_text())}
    assert {"FLAGCX_STORE_KEY", "FLAGCX_RANK", "FLAGCX_RESTARTS"} <= names
    example = {"FLAGCX_TIMEOUT"}  # of unknown_settings
    assert unknown_settings(dict.fromkeys(names - example, "")) == []


def test_init_warns_of_an_unknown_setting_once():
    program = "import flagcx as fc; fc.init(); fc.init()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=bare_environment(FLAGCX_TIMEOUT="5"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == (
        "FLAGCX_TIMEOUT=5 has no effect: there is no such setting; do you mean FLAGCX_TIMEOUT_S?\n"
    )
