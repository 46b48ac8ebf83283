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
from kvtier.kernels import elementwise, gathered_attention, kv_write, paged_attention, tuning

dtype, itemsize, head_dim, group = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 5
dim = triton.next_power_of_2(head_dim)
types = {
    "tables_ptr": "*i32", "starts_ptr": "*i32", "lengths_ptr": "*i32", "gather_starts_ptr": "*i32",
    "slots_ptr": "*i64", "parts_ptr": "*fp32", "best_ptr": "*fp32", "total_ptr": "*fp32", "cos_sin_ptr": "*fp32",
    "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "log2_scale": "fp32", "eps": "fp32", "max_value": "fp32",
    "min_scale": "fp32", "block_stride": "i64",
}
sizes = {
    "GROUP": group, "HEAD_DIM": head_dim, "DIM": dim, "BLOCK_TOKENS": 16, "KV_HEADS": 3, "HEADS": 4,
    "WINDOW": int(sys.argv[4]), "PRECISION": "ieee" if itemsize == 4 else "tf32", "MAX_SPLITS": 64,
    "OPERAND": {"fp32": triton.language.float32, "bf16": triton.language.bfloat16}[dtype],
    "KV_DIM": 2 * head_dim, "TOKENS": tuning.GATHER_TOKENS,
}

def compiled(kernel, tiles, is_split=False, **more):
    known = {**sizes, "TILE_ROWS": tiles.rows, "TILE_KEYS": tiles.keys, "IS_SPLIT": is_split, **more}
    constants = {name: known[name] for name in kernel.arg_names if name.isupper()}
    signature = {
        name: "constexpr" if name.isupper() else types.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    if "gathered" in signature:
        signature["gathered"] = f"tensordesc<{dtype}[{tiles.keys}, {head_dim}]>"
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names) if name.endswith(("_ptr", "_stride"))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    stages = tiles.num_split_stages if is_split else tiles.num_stages
    options = {"num_warps": tiles.num_warps, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

def tiles(max_query_tokens):
    return tuning.attention_tiles(group=group, head_dim=dim, itemsize=itemsize, max_query_tokens=max_query_tokens)

attend, join = paged_attention._attend_kernel, paged_attention._join_kernel
kernels = {
    "prefill": compiled(attend, tiles(4096), HAS_ROW_TILES=False),
    "chunk": compiled(attend, tiles(64), True, HAS_ROW_TILES=False),
    "few": compiled(attend, tiles(2), True, HAS_ROW_TILES=True),
    "decode": compiled(attend, tiles(1), True, HAS_ROW_TILES=True),
    "join": compiled(join, tiles(64), HAS_ROW_TILES=False),
    "write": compiled(kv_write._write_kernel, tiles(1)),
    "norm": compiled(elementwise._norm_kernel, tiles(1), SIZE=3000, COLUMNS=4096, HAS_RESIDUAL=True),
    "gate": compiled(elementwise._gate_kernel, tiles(1), SIZE=3000, COLUMNS=2048),
    "quantize": compiled(elementwise._quantize_kernel, tiles(1), SIZE=3000, COLUMNS=4096),
    "rotate": compiled(
        elementwise._rotate_kernel, tiles(1), QUERY_HEADS=3, PAIRS=head_dim // 2, COLUMNS=dim // 2,
        IS_INTERLEAVED=True, HAS_NORMS=True, HEADS_AT_ONCE=8,
    ),
}
if itemsize == 2:
    kernels["linear_gate"] = compiled(
        elementwise._linear_gate_kernel, tiles(1), SIZE=3200, INPUTS=1024, TOKENS=16, COLUMNS=32, STEP=128
    )
if tuning.gathers(head_dim=head_dim, itemsize=itemsize, gathered_bytes=1, queries_per_key=1e9):
    gathered = tuning.gathered_tiles(group=group, head_dim=head_dim)
    kernels["gathered"] = compiled(gathered_attention._attend_kernel, gathered)
    kernels["gather"] = compiled(gathered_attention._gather_kernel, gathered)
print(json.dumps({name: [one.metadata.shared, "wgmma" in one.asm["ptx"]] for name, one in kernels.items()}))
"""


@pytest.mark.parametrize(
    ("dtype", "itemsize", "head_dim", "window"),
    [("bf16", 2, 128, 0), ("bf16", 2, 256, 4096), ("fp32", 4, 80, 0)],
)
def test_kernels_compile_for_hopper(dtype: str, itemsize: int, head_dim: int, window: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    sizes = map(str, (itemsize, head_dim, window))
    command = [sys.executable, "-W", "error", "-c", COMPILE, dtype, *sizes]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert all(shared_bytes <= SHARED_MEMORY_BYTES for shared_bytes, _ in compiled.values())
    assert compiled.get("gathered", [0, True])[1], "long chunks run on the tensor cores' widest products"
    assert compiled["prefill"][1] == (dtype == "bf16"), "prefills of 16 bits run on the tensor cores' widest products"
