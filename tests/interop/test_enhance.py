"""What does not need ranks of torch: the missing package, wrong arguments, and a lone rank."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

import flagcx as fc
from tests.ranks import run_ranks

HIDDEN = "import sys; sys.modules['torch'] = None; import flagcx as fc; "


@pytest.mark.parametrize("name", ["enhance_process_group", "restore_process_group"])
def test_without_torch_the_error_has_the_pip_command(name):
    program = HIDDEN + (
        f"import numpy as np\n"
        f"try: fc.{name}()\n"
        f"except fc.MissingDependencyError as error: print(error)\n"
        f"print(fc.init().allreduce(np.arange(3)))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "need PyTorch, which is not installed: pip install 'flagcx[torch]'" in out
    assert "[0 1 2]" in out, "the rest of flagcx works without torch"


def test_without_torch_the_module_says_so_when_it_is_imported():
    program = HIDDEN + "import flagcx.interop.torch"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode and "pip install 'flagcx[torch]'" in done.stderr


def _run(program: str) -> str:
    """Output of a lone rank that has torch and a gloo group of its own."""
    pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch==2.13.0)")
    program = (
        "import torch, torch.distributed as dist, flagcx as fc\n"
        "def said(call):\n"
        "    try: call()\n"
        "    except fc.ArgumentError as error: print(error)\n" + program
    )
    return run_ranks(_printed, 1, program)[0]


def _printed(program: str) -> str:
    import torch.distributed as dist

    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            exec(program, {})
    finally:
        if dist.is_initialized():
            fc.restore_process_group()
            dist.destroy_process_group()
    return text.getvalue()


LONE = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"


@pytest.mark.slow
def test_wrong_arguments_are_named():
    out = _run(
        "said(fc.enhance_process_group)\n"
        + LONE
        + "said(lambda: fc.enhance_process_group(compresion=1))\n"
        + "said(lambda: fc.enhance_process_group(timeout_s=-1))\n"
        + "said(lambda: fc.enhance_process_group(dist.ProcessGroup(0, 1)))\n"
        + "said(lambda: fc.enhance_process_group('gloo'))\n"
        + "import flagcx.interop.torch as ours\n"
        + "said(lambda: ours.ddp_hook('int9'))\n"
        + "said(lambda: ours.ddp_hook(momentum=0.9))\n"
        + "dist.destroy_process_group()\n"
        + "said(lambda: dist.init_process_group('flagcx', store=dist.HashStore(), rank=0, world_size=1,"
        + " pg_options=3))\n"
    )
    for expected in (
        "call dist.init_process_group(...) first",
        "enhance_process_group has no option 'compresion'; expected group or one of",
        "timeout_s must be above 0 and at most 1e+08 seconds",
        "is not a process group of torch.distributed that is in use",
        "'gloo' is not a process group",
        "int9",
        "momentum and clip belong to a compression",
        "pg_options of backend 'flagcx' is a int; expected a dict of settings",
    ):
        assert expected in out, f"{expected!r} is not in {out}"


@pytest.mark.slow
def test_a_lone_rank_enhances_and_restores():
    out = _run(
        LONE + "plain = dist.group.WORLD\n"
        "group = fc.enhance_process_group()\n"
        "assert group is dist.group.WORLD is not plain and fc.enhance_process_group() is group\n"
        "assert fc.enhance_process_group(plain) is group, 'the old group leads to the new one'\n"
        "x = torch.arange(3.)\n"
        "dist.all_reduce(x); dist.barrier()\n"
        "print(dist.get_backend(), x.tolist(), group.size())\n"
        "assert fc.restore_process_group() is plain is dist.group.WORLD is fc.restore_process_group()\n"
        "dist.all_reduce(x, group=group)  # one who kept it still has a group that works\n"
        "dist.destroy_process_group()\n"
    )
    assert "gloo [0.0, 1.0, 2.0] 1" in out


@pytest.mark.slow
def test_both_groups_end_with_their_last_user():
    """Threads of a backend that outlives the interpreter may end the process with an abort."""
    out = _run(
        LONE + "import gc, weakref\n"
        "gc.collect(); gc.disable()\n"
        "for restores in (True, False):\n"
        "    plain = weakref.ref(dist.group.WORLD)\n"
        "    made = weakref.ref(fc.enhance_process_group())\n"
        "    work = dist.all_reduce(torch.arange(3.), async_op=True); work.wait(); del work\n"
        "    if restores:\n"
        "        fc.restore_process_group()\n"
        "        assert made() is None\n"
        "dist.destroy_process_group()\n"
        "print(plain(), made())\n"
    )
    assert "None None" in out


@pytest.mark.slow
def test_the_time_out_is_the_groups_own():
    out = _run(
        "import datetime\n"
        + LONE.replace("world_size=1", "world_size=1, timeout=datetime.timedelta(seconds=77)")
        + "print(fc.enhance_process_group().config.timeout_s)\n"
        + "fc.restore_process_group()\n"
        + "print(fc.enhance_process_group(timeout_s=5).config)\n"
    )
    assert "77.0" in out and "timeout_s=5" in out and "init_timeout_s=77" in out


def test_the_names_are_there_without_torch():
    assert "dist.all_reduce" in (fc.enhance_process_group.__doc__ or "")
