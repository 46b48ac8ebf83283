"""The kernels compile for a Hopper GPU, on a machine that has none, and fit its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY_BYTES = 227 * 1024

# In a process of its own: where these tests run, Triton interprets.
COMPILE = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvtier.kernels import kv_write, paged_attention, tuning

dtype, itemsize, head_dim, group = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 5
dim = triton.next_power_of_2(head_dim)
types = {
    "tables_ptr": "*i32", "starts_ptr": "*i32", "lengths_ptr": "*i32", "slots_ptr": "*i64", "parts_ptr": "*fp32",
    "best_ptr": "*fp32", "total_ptr": "*fp32", "log2_scale": "fp32", "block_stride": "i64",
}
sizes = {
    "GROUP": group, "HEAD_DIM": head_dim, "DIM": dim, "BLOCK_TOKENS": 16, "KV_HEADS": 3, "HEADS": 4,
    "WINDOW": int(sys.argv[4]), "SPLITS": int(sys.argv[5]), "PRECISION": "ieee" if itemsize == 4 else "tf32",
    "OPERAND": {"fp32": triton.language.float32, "bf16": triton.language.bfloat16}[dtype],
}
prefill = tuning.prefill_tiles(group=group, head_dim=dim, itemsize=itemsize, max_query_tokens=4096)
decode = tuning.decode_tiles(group=group, head_dim=dim, itemsize=itemsize)

def compiled(kernel, tiles):
    known = {**sizes, "TILE_ROWS": tiles.rows, "TILE_KEYS": tiles.keys}
    constants = {name: known[name] for name in kernel.arg_names if name.isupper()}
    signature = {
        name: "constexpr" if name.isupper() else types.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names) if name.endswith(("_ptr", "_stride"))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

kernels = {
    "prefill": compiled(paged_attention._prefill_kernel, prefill),
    "decode": compiled(paged_attention._decode_kernel, decode),
    "reduce": compiled(paged_attention._reduce_kernel, decode),
    "write": compiled(kv_write._write_kernel, decode),
}
print(json.dumps({name: [one.metadata.shared, "wgmma" in one.asm["ptx"]] for name, one in kernels.items()}))
"""


@pytest.mark.parametrize(
    ("dtype", "itemsize", "head_dim", "window", "splits"),
    [("bf16", 2, 128, 0, 8), ("bf16", 2, 256, 4096, 1), ("fp32", 4, 80, 0, 8)],
)
def test_kernels_compile_for_hopper(
    dtype: str, itemsize: int, head_dim: int, window: int, splits: int, tmp_path: Path
) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    sizes = map(str, (itemsize, head_dim, window, splits))
    command = [sys.executable, "-W", "error", "-c", COMPILE, dtype, *sizes]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert all(shared_bytes <= SHARED_MEMORY_BYTES for shared_bytes, _ in compiled.values())
    assert compiled["prefill"][1] == (dtype == "bf16"), "prefills of 16 bits run on the tensor cores' widest products"
