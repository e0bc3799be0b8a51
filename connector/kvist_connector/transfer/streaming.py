"""Copies of many pages in one call that leave the processor's caches alone, on one thread, without the GIL.

A C library stores past the caches only in one very long run of bytes. Pages are shorter, and then every line
that is written is read first: 0.65 of the speed. Used by cpu.py where llvmlite (an engine brings it with
numba), the processor and the addresses allow; the function is compiled in some ten milliseconds.
"""

from __future__ import annotations

import ctypes
import importlib
import platform
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

# Of addresses, and of lengths: a turn of the loop moves some lines from both halves of the bytes, which
# memory answers faster than one run (25 ms for 128 MiB in place of 40, on a busy machine).
ALIGNMENT: Final = 64
STRIDE: Final = 512
Jobs = npt.NDArray[np.int64]  # [..., 3]: target, source, bytes

_HALVES: Final = ("0", "%half")
_LINES: Final = STRIDE // ALIGNMENT // len(_HALVES)
_PROGRAM: Final = """
declare void @llvm.x86.sse.sfence()

define void @copy(ptr %jobs, i64 %count) {{
entry:
  %any = icmp sgt i64 %count, 0
  br i1 %any, label %job, label %done
job:
  %n = phi i64 [ 0, %entry ], [ %following, %next ]
  %row = mul i64 %n, 3
  %at.target = getelementptr i64, ptr %jobs, i64 %row
  %at.source = getelementptr i64, ptr %at.target, i64 1
  %at.bytes = getelementptr i64, ptr %at.target, i64 2
  %target = load ptr, ptr %at.target
  %source = load ptr, ptr %at.source
  %bytes = load i64, ptr %at.bytes
  %half = lshr i64 %bytes, 1
  br label %loop
loop:
  %i = phi i64 [ 0, %job ], [ %j, %loop ]
{turn}
  %j = add i64 %i, {step}
  %more = icmp slt i64 %j, %half
  br i1 %more, label %loop, label %next
next:
  %following = add i64 %n, 1
  %again = icmp slt i64 %following, %count
  br i1 %again, label %job, label %done
done:
  call void @llvm.x86.sse.sfence()
  ret void
}}
!0 = !{{i32 1}}
"""
_LOAD: Final = """
  %l{n} = add i64 %i, {offset}
  %o{n} = add i64 %l{n}, {half}
  %s{n} = getelementptr i8, ptr %source, i64 %o{n}
  %v{n} = load <8 x i64>, ptr %s{n}, align 64"""
_STORE: Final = """
  %t{n} = getelementptr i8, ptr %target, i64 %o{n}
  store <8 x i64> %v{n}, ptr %t{n}, align 64, !nontemporal !0"""


class StreamingCopy:
    """Owns the compiled function. Nothing is checked: see `allowed`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine  # the code lives as long as it
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
        self._copy: Callable[[int, int], None] = function(engine.get_function_address("copy"))

    def __call__(self, jobs: Jobs) -> None:
        """Do all jobs; they are in memory, for every thread and process, when this returns."""
        flat = np.ascontiguousarray(jobs).reshape(-1, 3)
        self._copy(flat.ctypes.data, len(flat))


def allowed(addresses: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> bool:
    """Whether jobs between such addresses, of such lengths, can be done."""
    return not (np.any(addresses % ALIGNMENT) or np.any(lengths % STRIDE) or np.any(lengths <= 0))


def streaming_copy() -> StreamingCopy | None:
    """None where there is no compiler for this processor."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    try:
        llvm = importlib.import_module("llvmlite.binding")
    except ImportError:
        return None
    _hide_fields(llvm.ffi.lib)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(_program())
    module.verify()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten()
    )
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    return StreamingCopy(engine)


def _hide_fields(library: Any) -> None:
    """Let llvmlite's object for its C library say that it has no `__dict__`.

    It takes that name for one of a C function. An engine's worker asks the values of all modules for their
    fields as it starts, and would end there: the second engine of a process that copies like this.
    """
    if not hasattr(library, "__dict__") or isinstance(vars(library), Mapping):
        return
    kind: Any = type(library)
    function = kind.__getattr__

    def member(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return function(self, name)

    kind.__getattr__ = member


def _program() -> str:
    places = [(half, line * ALIGNMENT) for half in _HALVES for line in range(_LINES)]
    turn = [_LOAD.format(n=n, half=half, offset=offset) for n, (half, offset) in enumerate(places)]
    turn += [_STORE.format(n=n) for n in range(len(places))]
    return _PROGRAM.format(turn="".join(turn), step=_LINES * ALIGNMENT)
