"""torch.distributed through flagcx: equal to gloo's results, call by call, on three ranks."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from tests.ranks import run_ranks

pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch==2.13.0)")

from tests.interop import jobs
from tests.interop.calls import CALLS

RANKS = 3
"""So that a group of two has one outside."""
NAMES = [*CALLS, *(check.__name__ for check in jobs.CHECKS)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    """``found(job)``: what each rank found, by check. A job runs or fails once for all that ask."""

    @lru_cache
    def run(job: str) -> list[dict[str, list[str]]] | AssertionError:
        path = tmp_path_factory.mktemp("store") / Path(job).name
        try:
            return run_ranks(getattr(jobs, job), RANKS, str(path), timeout_s=300)
        except AssertionError as error:
            return error

    def found(job: str) -> list[dict[str, list[str]]]:
        result = run(job)
        if isinstance(result, AssertionError):
            raise result
        return result

    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "restored"])
def test_an_enhanced_group_does_what_gloo_does(found, name):
    faults = [fault for each in found("enhanced") for fault in each[name]]
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "name", "again", "options"])
def test_the_backend_does_what_gloo_does(found, name):
    faults = [fault for each in found("backend") for fault in each[name]]
    assert not faults, "\n".join(faults)
