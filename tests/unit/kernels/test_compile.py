"""The kernels compile for a Hopper GPU, on a machine that has none, and fit its shared memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY_BYTES = 227 * 1024

# All of this in a process of its own: where these tests run, Triton interprets.
STARTS_EARLY = """
import re

def starts_early(compiled, may_read=()):
    \"\"\"Whether a kernel may start before the one before it ends; such a one waits before it touches memory.

    All but what it `may_read`, which the kernels right before it do not write.
    \"\"\"
    ptx = compiled.asm["ptx"]
    if "griddepcontrol" not in ptx:
        return False
    touched = re.search("(st|atom)[.]global|cp[.]async[.]c[ag]", ptx)
    assert ptx.index("griddepcontrol.wait") < touched.start()
    assert read_before_waiting(compiled.asm["ttir"]) == {f"%{name}" for name in may_read}
    if not may_read:
        assert ptx.index("griddepcontrol.wait") < re.search("ld[.]global|cp[.]async", ptx).start()
    return True

def read_before_waiting(ttir):
    \"\"\"Which pointers of a kernel's arguments loads come from, by where their addresses do.\"\"\"
    before = ttir[: re.search("grid_dependency_wait|griddepcontrol.wait", ttir).start()]
    loads = re.findall("tt[.]load (%[a-zA-Z0-9_]+)", before)
    pointers = dict(re.findall("(%[a-zA-Z0-9_]+) = [^%\\\\n]*(%[a-zA-Z0-9_]+)", ttir))
    bases = set()
    for load in loads:
        while load in pointers:  # the address of a load is the first operand of all it is made by
            load = pointers[load]
        bases.add(load)
    return bases
"""

COMPILE = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvtier.kernels import elementwise, gathered_attention, kv_write, paged_attention, tuning

dtype, itemsize, head_dim, group = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 5
dim = triton.next_power_of_2(head_dim)
types = {
    "tables_ptr": "*i32", "starts_ptr": "*i32", "lengths_ptr": "*i32", "gather_starts_ptr": "*i32",
    "shares_ptr": "*i32", "counters_ptr": "*i32", "slots_ptr": "*i64",
    "parts_ptr": "*fp32", "best_ptr": "*fp32", "total_ptr": "*fp32",
    "cos_sin_ptr": "*fp32", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "log2_scale": "fp32", "eps": "fp32",
    "max_value": "fp32", "min_scale": "fp32", "block_stride": "i64",
}
sizes = {
    "GROUP": group, "HEAD_DIM": head_dim, "DIM": dim, "BLOCK_TOKENS": 16, "KV_HEADS": 3, "HEADS": 8,
    "WINDOW": int(sys.argv[4]), "PRECISION": "ieee" if itemsize == 4 else "tf32", "MAX_SPLITS": 64,
    "OPERAND": {"fp32": triton.language.float32, "bf16": triton.language.bfloat16}[dtype],
    "KV_DIM": 2 * head_dim, "TOKENS": tuning.GATHER_TOKENS, "JOINS_LAST": False, "HAS_SHARES": False,
    "DEPENDENT_LAUNCH": False, "QUERY_HEADS": 15, "PAIRS": head_dim // 2, "COLUMNS": dim // 2, "IS_INTERLEAVED": False,
    "HAS_NORMS": False, "IS_QUANTIZED": False, "HAS_RESIDUAL": True,
}

def compiled(kernel, tiles, is_split=False, special=None, **more):
    types_now = {**types, **(special or {})}
    known = {
        **sizes, "TILE_ROWS": tiles.rows, "TILE_KEYS": tiles.keys, "LOOKS_AHEAD": tiles.looks_ahead,
        "IS_SPLIT": is_split, **more,
    }
    constants = {name: known[name] for name in kernel.arg_names if name.isupper()}
    signature = {
        name: "constexpr" if name.isupper() else types_now.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
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

def tiles(max_query_tokens, num_rows=1):
    return tuning.attention_tiles(
        group=group, head_dim=dim, itemsize=itemsize, max_query_tokens=max_query_tokens, num_rows=num_rows
    )

total = {"total_ptr": f"*{dtype}"}
attend, join = paged_attention._attend_kernel, paged_attention.join_kernel
kernels = {
    "prefill": compiled(attend, tiles(4096), HAS_ROW_TILES=False),
    "chunk": compiled(attend, tiles(64), True, HAS_ROW_TILES=False),
    "few": compiled(attend, tiles(2), True, HAS_ROW_TILES=True),
    "decode": compiled(attend, tiles(1), True, HAS_ROW_TILES=True, JOINS_LAST=True),
    "overlapping": compiled(
        attend, tiles(1), True, HAS_ROW_TILES=True, JOINS_LAST=True, HAS_SHARES=True, DEPENDENT_LAUNCH=True
    ),
    "many decodes": compiled(attend, tiles(1, 1000), HAS_ROW_TILES=True),
    "join": compiled(join, tiles(64), HAS_ROW_TILES=False),
    "write": compiled(kv_write._write_kernel, tiles(1), QUERY_HEADS=0, PAIRS=0),
    "rotate": compiled(kv_write._write_kernel, tiles(1), IS_INTERLEAVED=True, HAS_NORMS=True, DEPENDENT_LAUNCH=True),
    "rotate a part": compiled(kv_write._write_kernel, tiles(1), PAIRS=head_dim // 4),
    "norm": compiled(elementwise._norm_kernel, tiles(1), special=total, DEPENDENT_LAUNCH=True, SIZE=3584, COLUMNS=4096),
    "norm in 8 bits": compiled(
        elementwise._norm_kernel, tiles(1), special={**total, "normed_ptr": "*fp8e4nv"}, DEPENDENT_LAUNCH=True,
        SIZE=3584, COLUMNS=4096, IS_QUANTIZED=True,
    ),
    "gate": compiled(elementwise._gate_kernel, tiles(1), DEPENDENT_LAUNCH=True, SIZE=3000, COLUMNS=2048),
    "quantize": compiled(elementwise._quantize_kernel, tiles(1), DEPENDENT_LAUNCH=True, SIZE=3000, COLUMNS=4096),
}
if itemsize == 2:
    kernels["linear_gate"] = compiled(
        elementwise._linear_gate_kernel, tiles(1), DEPENDENT_LAUNCH=True, SIZE=3200, INPUTS=1024, TOKENS=16, COLUMNS=32,
        STEP=128,
    )
if tuning.gathers(head_dim=head_dim, itemsize=itemsize, gathered_bytes=1, queries_per_key=1e9):
    gathered = tuning.gathered_tiles(group=group, head_dim=head_dim)
    kernels["gathered"] = compiled(gathered_attention._attend_kernel, gathered)
    kernels["gather"] = compiled(gathered_attention._gather_kernel, gathered)

# Weights are nobody's to write. Attention looks up what the step was given: the kernel before has waited for all that.
MAY_READ = {
    "norm": ["weight_ptr"], "norm in 8 bits": ["weight_ptr"],
    "overlapping": ["shares_ptr", "tables_ptr"] if itemsize == 2 else ["shares_ptr"],
}

def layouts(compiled):
    return sorted(set(re.findall("#ttg[.]blocked<[^>]*>", compiled.asm["ttgir"])))

# Attention looks up what was written before the kernel that writes the KV: that one lets it start when it has waited.
for name in ("rotate", "overlapping"):
    ptx = kernels[name].asm["ptx"]
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")

# Without looking ahead Triton would keep one tile of KV, and ask for the next when that is computed.
for name in ("decode", "many decodes"):
    assert ("memdesc<2x" in kernels[name].asm["ttgir"]) == (itemsize == 2)

# Which thread has which numbers is what the order of a sum depends on.
assert layouts(kernels["norm"]) == layouts(kernels["norm in 8 bits"])

print(json.dumps({
    name: [one.metadata.shared, "wgmma" in one.asm["ptx"], starts_early(one, MAY_READ.get(name, ()))]
    for name, one in kernels.items()
}))
"""

COMPILE_PRODUCTS = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvtier.kernels import fp8_product, int4_product, plain_product, tuning

types = {
    "scales_ptr": "*fp32", "out_peaks_ptr": "*fp32", "parts_ptr": "*fp32", "counters_ptr": "*i32",
    "weight_ptr": "*fp8e4nv", "max_value": "fp32", "min_scale": "fp32", "words_ptr": "*i32", "zeros_ptr": "*i32",
}

def compiled(kernel, tile, special=None, **constants):
    known = {"ROWS": tile.rows, "STEP": tile.step, "SPLITS": tile.splits, "HAS_BIAS": True,
             "DEPENDENT_LAUNCH": tile.dependent_launch, **constants}
    known["OPERAND"] = triton.language.bfloat16
    types_now = {**types, **(special or {})}
    signature = {
        name: "constexpr" if name.isupper() else types_now.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    constants = {name: known[name] for name in kernel.arg_names if name.isupper()}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names) if name.endswith(("_ptr", "_stride"))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

def fp8(num_tokens, inputs, outputs, *, peaks, is_quantized=False, is_gated=False, special=None):
    rows = tuning.peak_rows(num_tokens)
    sizes = {"inputs": inputs, "outputs": outputs, "input_bytes": 1 if is_quantized else 2}
    return compiled(
        fp8_product._product_kernel, tuning.fp8_tile(num_tokens=num_tokens, **sizes), special,
        INPUTS=inputs, OUTPUTS=outputs // 2 if is_gated else outputs, PEAKS=peaks, PEAK_ROWS=rows,
        PEAK_COLUMNS=min(triton.next_power_of_2(peaks), tuning.PEAKS_AT_ONCE // rows),
        IS_QUANTIZED=is_quantized, IS_GATED=is_gated, TOKENS=tuning.few_tokens(num_tokens),
        COPIED=tuning.few_tokens(num_tokens) if is_quantized else tuning.copied_tokens(num_tokens),
    )

def plain(num_tokens, inputs, outputs):
    return compiled(
        plain_product._product_kernel, tuning.plain_tile(inputs=inputs, outputs=outputs), {"weight_ptr": "*bf16"},
        INPUTS=inputs, OUTPUTS=outputs, TOKENS=tuning.few_tokens(num_tokens),
    )

def int4(kernel, num_tokens, inputs, outputs, group):
    return compiled(
        kernel, tuning.int4_tile(inputs=inputs, outputs=outputs), {"scales_ptr": "*i32", "weight_ptr": "*bf16"},
        INPUTS=inputs, OUTPUTS=outputs, GROUP=group, TOKENS=tuning.few_tokens(num_tokens),
    )

wide = {"peaks_ptr": "*fp32"}
eights = {**wide, "hidden_ptr": "*fp8e4nv"}
kernels = {
    "qkv": fp8(1, 3584, 4608, peaks=3584),
    "gate": fp8(4, 3584, 37888, peaks=3584, is_gated=True),
    "down": fp8(16, 18944, 3584, peaks=592, special=wide),
    "odd": fp8(2, 1040, 208, peaks=1040),
    "qkv of 8 bits": fp8(1, 3584, 4608, peaks=1, is_quantized=True, special=eights),
    "gate of 8 bits": fp8(4, 3584, 37888, peaks=1, is_quantized=True, is_gated=True, special=eights),
    "many": fp8(64, 3584, 4608, peaks=1, is_quantized=True, special=eights),
    "plain": plain(1, 3584, 4608),
    "plain_odd": plain(10, 1000, 72),
    "int4": int4(int4_product._product_kernel, 1, 3584, 4608, 128),
    "int4_many": int4(int4_product._product_kernel, 64, 18944, 3584, 32),
    "dequantize": int4(int4_product._dequantize_kernel, 1, 3584, 4608, 128),
}
print(json.dumps({
    name: [
        one.metadata.shared, starts_early(one),
        *(word in one.asm["ptx"] for word in ("wgmma", "e4m3.e4m3", "cp.async.cg"))
    ]
    for name, one in kernels.items()
}))
"""

COMPILE_COPIES = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvtier.kernels import argmax, host_copy, token_mask

def ptx(kernel, num_warps, types, **constants):
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if "_ptr" in name}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

longs = dict.fromkeys(
    ("tokens_ptr", "last_tokens_ptr", "placed_tokens_ptr", "slots_ptr", "target_ptr", "token_ids_ptr"), "*i64"
)
words = {"WORDS": host_copy._WORDS, "QUAD": host_copy._QUAD}
print(json.dumps({
    "copy": ptx(host_copy._copy_kernel, host_copy._WARPS, {}, **words),
    "place": ptx(host_copy._place_kernel, host_copy._WARPS, longs, **words),
    "hand_out": ptx(host_copy._hand_out_kernel, 4, longs, TOKENS=host_copy._TOKENS),
    "piece": ptx(
        argmax._piece_kernel, argmax._WARPS, {"logits_ptr": "*bf16", "bests_ptr": "*fp32"},
        VOCAB=152064, COLUMNS=argmax._COLUMNS,
    ),
    "best": ptx(
        argmax._best_kernel, argmax._JOIN_WARPS, {**longs, "bests_ptr": "*fp32"},
        VOCAB=152064, PIECES=38, COLUMNS=64,
    ),
    "forbid": ptx(
        token_mask._forbid_kernel, token_mask._WARPS, {"logits_ptr": "*bf16", "rows_ptr": "*i64"},
        VOCAB=152064, COLUMNS=token_mask._COLUMNS,
    ),
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "itemsize", "head_dim", "window"),
    [("bf16", 2, 128, 0), ("bf16", 2, 256, 4096), ("fp32", 4, 80, 0)],
)
def test_kernels_compile_for_hopper(dtype: str, itemsize: int, head_dim: int, window: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    sizes = map(str, (itemsize, head_dim, window))
    command = [sys.executable, "-W", "error", "-c", STARTS_EARLY + COMPILE, dtype, *sizes]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert all(shared_bytes <= SHARED_MEMORY_BYTES for shared_bytes, *_ in compiled.values())
    assert all(compiled[name][2] for name in ("norm", "norm in 8 bits", "gate", "quantize", "overlapping", "rotate"))
    assert compiled.get("linear_gate", [0, False, True])[2]
    assert compiled.get("gathered", [0, True])[1], "long chunks run on the tensor cores' widest products"
    assert compiled["prefill"][1] == (dtype == "bf16"), "prefills of 16 bits run on the tensor cores' widest products"


@pytest.mark.slow
def test_products_compile_for_hopper(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", STARTS_EARLY + COMPILE_PRODUCTS]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    for name, (shared_bytes, is_early, is_wide, is_eight_bits, is_ahead) in compiled.items():
        assert shared_bytes <= SHARED_MEMORY_BYTES / 2, "at least two programs share a multiprocessor"
        assert is_early == (not name.startswith(("int4", "dequantize"))), name
        assert is_wide == is_ahead == (name != "dequantize"), name
        assert is_eight_bits == (not name.startswith(("int4", "dequantize", "plain"))), name


@pytest.mark.slow
def test_what_runs_around_graphs_compiles_for_hopper(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", COMPILE_COPIES],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    for name in ("copy", "place"):
        # Triton 3.6 leaves the modifier out. It needs none in the first cache, which is empty when a kernel begins.
        reads = re.search(r"ld\.global(\.cv)?\.v4\.b32", compiled[name])
        assert reads, "16 bytes of the host's memory are read once, not four times"
    assert re.search(r"ld\.global\.v4\.b32", compiled["piece"]), "eight logits are read at a time"
    assert compiled["hand_out"].count("st.global.b64") == 2, "to the host and to the slot"
