"""The benchmark over test hosts: each library takes part, and its results are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import hosts

SCRIPT = Path(hosts.__file__).with_name("two_hosts.py")


@pytest.mark.slow
@pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing() or "root")
def test_gloo_is_measured_beside_flagcx(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("ucxx")
    out = tmp_path / "rows"
    given = ["--start", "torchrun", "--ranks", "1,1", "--sizes", "4K", "--rounds", "1", "--out", str(out)]
    names = ["allreduce", "allgather", "reduce_scatter", "broadcast", "reduce"]
    line = [sys.executable, str(SCRIPT), *given, "--collectives", ",".join(names)]
    subprocess.run(line, check=True, timeout=60, stdout=subprocess.DEVNULL)
    rows = [json.loads(row) for row in out.read_text().splitlines()]
    found = {(row["collective"], row["library"]): row["error"] for row in rows}
    assert {(name, library) for name in names for library in ("flagcx", "gloo")} <= found.keys()
    assert set(found.values()) == {0.0}
