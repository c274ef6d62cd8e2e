"""``flagcx tune``: writes a table that the next start of the ranks uses."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flagcx as fc
from flagcx.cli.tune import sizes
from flagcx.selection.candidates import Request
from flagcx.selection.table import Table, read_table, save_table
from tests.hosts import run_by_torchrun
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def _tune(*arguments: str, cache: Path, ranks_of: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    environ = os.environ | {
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": str(ROOT),
        "FLAGCX_SLOT_NBYTES": "8192",
    }
    command = [sys.executable, "-m", "flagcx.cli", *ranks_of, *arguments]
    return subprocess.run(command, env=environ, cwd=cache, capture_output=True, text=True, timeout=120)


def _note():
    comm = fc.init(slot_nbytes=8192)
    comm.allreduce(np.ones(64, np.float32))
    return comm._host.selector.note, comm._host.selector.choose(Request("scatter", 1024, comm.size)).reason


@pytest.mark.slow
def test_what_it_measures_is_used_by_the_next_start(tmp_path, monkeypatch):
    ended = _tune("tune", "-n", "2", "--quick", "-c", "scatter", cache=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (path,) = (tmp_path / "flagcx" / "tuning").iterdir()
    assert f"measured; the table is {path}" in ended.stdout.replace("\n", "")
    table = Table.from_json(path.read_text())
    assert set(table.measured) == {"scatter"}
    assert [p.nbytes for p in table.measured["scatter"]] == [n // 2 for n in sizes(quick=True)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FLAGCX_TUNING", raising=False)
    notes = run_ranks(_note, 2)
    assert notes[0] == notes[1]
    note, reason = notes[0]
    assert note == f"measured, {path}"
    assert "measured on this machine" in reason
    alone, _ = run_ranks(_note, 1)[0]
    assert "not measured on this machine; flagcx tune -n 1" in alone


def test_the_ranks_of_a_job_measure_together(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import sys\nfrom flagcx.cli import main, tune\n"
        "tune.sizes = lambda quick: [256, 1024]\n"
        "sys.argv = ['flagcx', 'tune', '--quick', '-c', 'gather', '-o', 'here.json']\nmain()\n"
    )
    ended = _tune(str(script), cache=tmp_path, ranks_of=("run", "-n", "2"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    table = Table.from_json((tmp_path / "here.json").read_text())
    assert table.fit.ranks == 2
    assert [p.nbytes for p in table.measured["gather"]] == [128, 512]
    assert not (tmp_path / "flagcx").exists()


def test_a_wrong_call_is_told_in_a_line(tmp_path):
    ended = _tune("tune", "-c", "barrier", cache=tmp_path)
    assert ended.returncode == 2
    assert "--collective barrier cannot be tuned; use some of allreduce, allgather" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_sizes():
    assert sizes(quick=True)[0] == 256 and sizes(quick=True)[-1] == 16 << 20
    assert sizes(quick=False) == [256 * 4**k for k in range(11)]


@pytest.mark.slow
def test_what_several_hosts_measure_is_used_by_them_alone(test_hosts, tmp_path):
    pytest.importorskip("ucxx", reason="the extra 'ucx' is not installed")
    settings = {"XDG_CACHE_HOME": str(tmp_path), "UCX_TLS": "tcp,self", "FLAGCX_TUNING": "1"}

    def told(job: str) -> str:
        codes, printed = run_by_torchrun(
            test_hosts[:2], [1, 1], "tests.cli.tuning_jobs", job, settings=settings
        )
        assert codes == [0, 0], printed
        return "".join(printed)

    assert "measured; the table is" in told("tune")
    (path,) = (tmp_path / "flagcx" / "tuning").iterdir()
    assert "-ucx-2-2-hosts-" in path.name
    assert told("choose").count(f"measured, {path}: measured on these hosts: about") == 2
    table = read_table(path)
    slower = {**table.fit.hosts, "bandwidth_gb_per_s": 1e-9}
    save_table(replace(table, fit=replace(table.fit, hosts=slower)), path)
    refused = told("choose")
    assert refused.count("json is ignored: it was measured with") == 3, "two notes and a warning"
    assert refused.count("RuntimeWarning") == 1
