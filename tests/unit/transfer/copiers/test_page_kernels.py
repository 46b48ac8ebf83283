"""Runs the cases of the kernels in a process of its own, as `test_triton.py` of the other kernels does and says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernel_cases import run_cases

CASES = Path(__file__).with_name("page_kernel_cases.py")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvtier.transfer.copiers.page_kernels import _move_kernel

sizes = {
    "LAYERS": 28, "HEADS": 4, "TOKENS": 16, "PART_TOKENS": 16, "WIDTH": 256, "TILE_TOKENS": 16, "TILE_WIDTH": 256,
    "UNIT": 16, "dim_stride": 1,
}
types = {"pages_ptr": "*i16", "staging_ptr": "*i16", "layers_ptr": "*i64", "places_ptr": "*i64"}
for is_scatter in (False, True):
    constants = {**sizes, "IS_SCATTER": is_scatter}
    names = _move_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name not in constants}
    source = ASTSource(fn=_move_kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "ld.global.v4.b32" in compiled.asm["ptx"], "16 bytes are read at once"
    assert "st.global.v4.b32" in compiled.asm["ptx"], "16 bytes are written at once"
"""


@pytest.mark.scaled
def test_kernels_move_what_their_twin_moves(pytestconfig: pytest.Config) -> None:
    run_cases([CASES], 1, 1, pytestconfig)


@pytest.mark.slow
def test_kernels_compile_for_hopper_and_move_wide_words(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", COMPILE]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
