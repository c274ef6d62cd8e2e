"""NVRTC through ctypes: compiles a kernel for any architecture on a machine without a GPU."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of a source: its status (0: none wrong), its log and the code."""

    status: int
    log: str
    code: bytes


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The NVRTC library of an installed wheel or toolkit, or None."""
    for path in (*_in_wheels(), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _in_wheels() -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    found = [p for root in roots for p in glob.glob(os.path.join(root, "*", "lib", "libnvrtc.so.*"))]
    return sorted(found, reverse=True)


@lru_cache(maxsize=1)
def _quick() -> tuple[str, ...]:
    """The option that leaves the optimizers out, where this NVRTC has it."""
    nvrtc, major, minor = library(), ctypes.c_int(), ctypes.c_int()
    assert nvrtc is not None
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return ("--Ofast-compile=max",) if (major.value, minor.value) >= (12, 9) else ()


def compile_for(source: str, architecture: str, options: tuple[str, ...], quickly: bool = False) -> Compiled:
    """Compiles ``source``.

    Args:
        source: CUDA C++.
        architecture: "sm_90" for machine code, "compute_90" for PTX, which takes half the time.
        options: Of NVRTC.
        quickly: Leave the optimizers out, which takes a third of the time. The compiler warns of the same,
            and the assembler sees the same instructions of inline assembly.
    """
    nvrtc = library()
    assert nvrtc is not None, "no NVRTC library; check library() first"
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"fused.cu", 0, None, None)
    assert status == 0, f"nvrtcCreateProgram gave {status}"
    options = (f"--gpu-architecture={architecture}", *options, *(_quick() if quickly else ()))
    flags = [o.encode() for o in options]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode().strip("\0\n ")
    kind = "CUBIN" if architecture.startswith("sm_") else "PTX"
    size, fill = (getattr(nvrtc, f"nvrtcGet{kind}{end}") for end in ("Size", ""))
    code = _text(size, fill, program) if status == 0 else b""
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return Compiled(status, log, code)


def target(architecture: str, ranks: int) -> str:
    """PTX for kernels of many ranks: their machine code would have the instructions of few, more often."""
    return architecture if ranks <= 4 else architecture.replace("sm_", "compute_")


def _text(size_of, fill, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    assert size_of(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert fill(program, buffer) == 0
    return buffer.raw
