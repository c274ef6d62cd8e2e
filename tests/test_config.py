"""Settings: names that nothing reads are told, with the name that may have been meant."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import flagcx
from flagcx.config import Config, unknown_settings
from flagcx.errors import ArgumentError
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


NO_TIMES = [float("nan"), -1, -float("inf"), "5", None, True, [3]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("timeout_s", "init_timeout_s", "explain_wait_s") for value in NO_TIMES),
        *(("kill_after_s", value) for value in NO_TIMES),
        ("timeout_s", float("inf")),
        ("timeout_s", 1e9),
        ("init_timeout_s", float("inf")),
        ("explain_wait_s", 0),
    ],
)
def test_a_time_that_is_no_time_is_refused_with_what_it_may_be(name, value):
    with pytest.raises(ArgumentError, match=rf"{name} must be .*got {re.escape(repr(value))}"):
        Config(**{name: value})


@pytest.mark.parametrize("text", ["inf", "nan", "-3", "0", "five"])
def test_a_variable_that_is_no_time_is_refused(text):
    with pytest.raises(ArgumentError, match=r"(?i)timeout_s"):
        Config.from_environment({"FLAGCX_TIMEOUT_S": text})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("profile", "no"),
        ("cross_memory", None),
        ("slot_nbytes", 8192.0),
        ("slot_nbytes", "8192"),
        ("debug", 1),
    ],
)
def test_a_setting_of_another_type_is_refused(name, value):
    with pytest.raises(ArgumentError, match=rf"{name} must be (True or False|an int|a str), got"):
        Config(**{name: value})


def test_settings_of_the_right_kind_are_taken():
    Config(kill_after_s=float("inf"))
    Config(timeout_s=5, kill_after_s=0, init_timeout_s=1e8, profile=0, tuning_file=Path("table.json"))
