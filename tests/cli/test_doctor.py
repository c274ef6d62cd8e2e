"""``flagcx doctor`` and ``flagcx --version``."""

from __future__ import annotations

import json
import os

import pytest
import typer
from typer.testing import CliRunner

import flagcx as fc
from flagcx.cli import application, doctor
from flagcx.kernels.cuda import driver_cuda, pip_command

FAR = "/opt/" + "far/" * 30 + "mpirun"


@pytest.fixture
def call():
    made = typer.Typer()
    made.command()(doctor.doctor)
    return lambda *options: CliRunner().invoke(made, list(options))


def test_what_is_found_stands_whole_in_a_pipe(call, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: FAR)
    monkeypatch.setenv("COLUMNS", "80")
    result = call()
    assert result.exit_code == 0
    assert FAR in result.stdout


def test_on_a_terminal_a_path_goes_on_in_the_next_line(call, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: FAR)
    monkeypatch.setattr("flagcx.cli.doctor._UNLIMITED", 80)
    lines = call().stdout.splitlines()
    assert max(map(len, lines)) <= 80
    found = "".join(line.split("│")[3].strip() for line in lines if line.count("│") == 5)
    assert FAR in found and "…" not in found


def test_what_is_missing_has_the_command_that_errors_have(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda distribution: "")
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    found = {finding.what: finding for finding in doctor.examine()}
    assert found["CuPy"].advice == found["NCCL"].advice == pip_command(driver_cuda())
    assert found["matplotlib"].advice == "pip install 'flagcx[plot]'"
    assert found["mpi4py"].advice == "pip install 'flagcx[mpi]'"
    assert found["PyTorch"].advice == "pip install 'flagcx[torch]'"
    assert not any(found[name].good for name in ("CuPy", "NCCL", "matplotlib", "mpi4py", "PyTorch"))


def test_the_version():
    result = CliRunner().invoke(application(), ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"flagcx {fc.__version__}\n")


def test_the_findings_as_json(call, monkeypatch):
    monkeypatch.setenv("FLAGCX_TIMEOUT", "5")
    found = {one["what"]: one for one in json.loads(call("--json").stdout)}
    assert found["Python"]["good"] and found["cores"]["found"].endswith(str(os.cpu_count()))
    assert not found["FLAGCX_ settings"]["good"]
    assert "do you mean FLAGCX_TIMEOUT_S?" in found["FLAGCX_ settings"]["advice"]
