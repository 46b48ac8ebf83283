"""How fast are the products of a few tokens with weights in 16, 8 and 4 bits, and how should `kernels/tuning` cut them?

    python -m benchmarks.quantized_products [--json FILE] [--seconds 60] [--tokens 1 2 4 8 16] [--search fp8 ...]

Needs a GPU. Each product of a layer of Qwen2.5-7B is timed as a CUDA graph over the weights of all layers, which are
more than the cache holds: cuBLAS in bfloat16 and our kernel beside it (gate and up are ours in both),
`torch._scaled_mm` with our kernel that quantises, and our kernels for weights in 8 and 4 bits. First with the tiles
that `kernels/tuning` chooses, for every number of tokens. Then all work of a layer except attention, in its order, with
and without dependent launches (`tuning.DEPENDENT_LAUNCHES`), in 8 bits also with norms that quantise
(`tuning.NORMS_QUANTIZE`). Finally, for the first number of tokens, as many other tiles as time allows, and the best of
each product for the other numbers. Settings are for `fp8_tile`, `plain_tile` and `int4_tile`. All results are compared
with the twins; ends with status 1 if one is wrong or a bar is missed.
"""

from __future__ import annotations

import argparse
import enum
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import Result, console, print_figures, print_table
from kvtier.kernels import elementwise, fp8_product, int4_product, plain_product, tuning
from kvtier.kernels.quantized_rows import QuantizedRows
from kvtier.models.fused_operations import silu_mul
from kvtier.models.quantization import fp8

LAYERS = 28
GROUP_SIZE = 128
DTYPE = torch.bfloat16
REPEATS = 7
MAX_ERROR = 0.01
FP8_LIMITS = {"max_value": 448.0, "min_scale": 1e-12}
EPS = 1e-6
FIRST_SHARE = 0.75  # share of a kind's time for the first number of tokens
COMPILING_SHARE = 0.8

BARS = {"fp8_products_x": ">= 1.75", "int4_products_x": ">= 1.0"}
"""Speed-up over bfloat16, for one token. A step that is 1.5 times as fast needs products that are 1.75 times as fast:
the work between them, and the head, stay as they are."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One product of a layer."""

    name: str
    inputs: int
    outputs: int
    is_gated: bool = False
    has_peaks: bool = False
    is_normed: bool = False
    """Whether its inputs come from a norm."""


SHAPES = (
    Shape("qkv", 3584, 4608, is_normed=True),
    Shape("output", 3584, 3584),
    Shape("gate_up", 3584, 37888, is_gated=True, is_normed=True),
    Shape("down", 18944, 3584, has_peaks=True),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """The constants of `kernels/tuning`; the splits of a shape follow."""

    rows: int
    step: int
    num_warps: int
    num_stages: int
    programs: int
    """Programs per multiprocessor."""
    dependent_launch: bool = True

    def tile(self, shape: Shape) -> tuning.ProductTile:
        splits = tuning.product_splits(
            -(-shape.outputs // self.rows), -(-shape.inputs // self.step), self.programs * tuning.MULTIPROCESSORS
        )
        return tuning.ProductTile(self.rows, self.step, splits, self.num_warps, self.num_stages, self.dependent_launch)


FP8_SETTINGS = [
    Setting(rows, step, warps, stages, programs)
    for (rows, step, warps, stages), all_programs in [
        ((64, 128, 4, 3), (4,)),
        ((64, 128, 4, 4), (2, 3, 4)),
        ((64, 128, 4, 5), (3, 4)),
        ((64, 128, 4, 6), (2, 4)),
        ((64, 256, 4, 2), (4,)),
        ((64, 256, 4, 3), (2, 4)),
        ((64, 256, 4, 4), (2,)),
        ((128, 128, 4, 3), (2,)),
        ((128, 128, 4, 4), (2, 3)),
        ((128, 128, 8, 4), (2,)),
    ]
    for programs in all_programs
]
FP8_SETTINGS.append(Setting(64, 128, 4, 4, 4, dependent_launch=False))
PLAIN_SETTINGS = [
    Setting(rows, step, 4, stages, programs)
    for (rows, step, stages), programs in [
        ((64, 128, 3), 3),
        ((64, 128, 4), 2),
        ((64, 128, 3), 2),
        ((64, 128, 2), 4),
        ((64, 128, 2), 5),
        ((64, 64, 6), 3),
        ((64, 64, 8), 2),
        ((64, 256, 2), 2),
        ((128, 64, 4), 3),
    ]
]
PLAIN_SETTINGS.append(Setting(64, 128, 4, 3, 3, dependent_launch=False))
INT4_SETTINGS = [
    Setting(128, 128, 4, stages, programs, dependent_launch=False)
    for stages, programs in itertools.product([3, 4], [3, 5, 8])
]


class Stand:
    """The weights of one shape for all layers, in all kinds, and their expected products."""

    def __init__(self, shape: Shape, max_tokens: int) -> None:
        self.shape = shape
        generator = torch.Generator("cuda").manual_seed(0)
        size = (shape.outputs, shape.inputs)
        self.hidden = torch.randn(max_tokens, shape.inputs, device="cuda", generator=generator).to(DTYPE)
        self.plain = [torch.empty(size, dtype=DTYPE, device="cuda") for _ in range(LAYERS)]
        for weight in self.plain:
            weight.normal_(0.0, shape.inputs**-0.5, generator=generator)
        self.fp8 = [fp8.quantize_rows(weight) for weight in self.plain]
        self.counters = fp8_product.make_counters(shape.outputs, torch.device("cuda"))
        limits = torch.iinfo(torch.int32)
        num_groups = shape.inputs // GROUP_SIZE
        self.words = [
            torch.randint(limits.min, limits.max, (num_groups, shape.outputs, 16), dtype=torch.int32, device="cuda")
            for _ in range(LAYERS)
        ]
        zeros = (num_groups, shape.outputs // 8)
        self.zeros = [torch.full(zeros, 0x77777777, dtype=torch.int32, device="cuda") for _ in range(LAYERS)]
        self.scales = [
            (torch.rand(num_groups, shape.outputs, device="cuda", generator=generator) * 0.01).half()
            for _ in range(LAYERS)
        ]

    def inputs(self, num_tokens: int, kind: Kind) -> Inputs:
        hidden = self.hidden[:num_tokens]
        if kind is Kind.FP8 and self.shape.is_normed and tuning.NORMS_QUANTIZE:
            return Inputs(QuantizedRows(*fp8.quantize_rows(hidden), DTYPE), None)
        peaks = hidden.float().abs().unflatten(1, (-1, 32)).amax(-1) if self.shape.has_peaks else None
        return Inputs(hidden, peaks)

    def expected_fp8(self, hidden: Tensor | QuantizedRows) -> Tensor:
        is_quantized = isinstance(hidden, QuantizedRows)
        values, value_scales = (hidden.values, hidden.scales) if is_quantized else fp8.quantize_rows(hidden)
        weight, scales = self.fp8[0]
        product = (values.float() @ weight.float().t()) * value_scales * scales.t()
        return silu_mul(product) if self.shape.is_gated else product

    def expected_plain(self, hidden: Tensor) -> Tensor:
        product = hidden.float() @ self.plain[0].float().t()
        return silu_mul(product) if self.shape.is_gated else product

    def expected_int4(self, hidden: Tensor) -> Tensor:
        weight = int4_product.dequantize(self.words[0], self.zeros[0], self.scales[0], DTYPE)
        return hidden.float() @ weight.float().t()


@dataclass(frozen=True, slots=True)
class Inputs:
    """Some tokens, and the peaks that the previous product has noted, one per 32 columns."""

    hidden: Tensor | QuantizedRows
    peaks: Tensor | None


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs and their peaks."""

    hidden: Tensor
    peaks: Tensor | None


class Kind(enum.Enum):
    """A kernel that multiplies."""

    CUBLAS = "bfloat16"
    PLAIN = "bfloat16, ours"
    SCALED_MM = "_scaled_mm"
    FP8 = "fp8"
    INT4 = "int4"


SEARCHED = {Kind.FP8: (FP8_SETTINGS, 0.5), Kind.PLAIN: (PLAIN_SETTINGS, 0.3), Kind.INT4: (INT4_SETTINGS, 0.2)}
"""Settings to try, and their share of the time."""


def multiply(kind: Kind, stand: Stand, inputs: Inputs, layer: int, setting: Setting | None = None) -> Outputs:
    """One product. `setting` is for our kernels, which choose their own by default."""
    hidden, is_gated = inputs.hidden, stand.shape.is_gated
    tile = None if setting is None else setting.tile(stand.shape)
    found: Tensor | None
    match kind:
        case Kind.CUBLAS | Kind.PLAIN if is_gated:
            found = elementwise.linear_silu_mul(hidden, stand.plain[layer])
            if found is None:
                found = silu_mul(functional.linear(hidden, stand.plain[layer]))
        case Kind.CUBLAS:
            found = functional.linear(hidden, stand.plain[layer])
        case Kind.PLAIN:
            found = plain_product.linear(hidden, stand.plain[layer], None, stand.counters, tile=tile)
            if found is None:
                found = functional.linear(hidden, stand.plain[layer])
        case Kind.SCALED_MM:
            product = fp8.scaled_matmul(*fp8.quantize_rows(hidden), *stand.fp8[layer], DTYPE)
            found = silu_mul(product) if is_gated else product
        case Kind.FP8:
            settled = (hidden, *stand.fp8[layer], None, stand.counters)
            if is_gated:
                both = fp8_product.linear_silu_mul(*settled, **FP8_LIMITS, tile=tile)
                assert both is not None
                return Outputs(*both)
            found = fp8_product.linear(*settled, **FP8_LIMITS, peaks=inputs.peaks, tile=tile)
        case Kind.INT4:
            packed = (stand.words[layer], stand.zeros[layer], stand.scales[layer])
            found = int4_product.linear(hidden, *packed, None, stand.counters, tile=tile)
    assert found is not None
    return Outputs(found, None)


def run_layers(kind: Kind, stands: Sequence[Stand], hidden: Tensor, norm_weight: Tensor) -> Tensor:
    """All work of a model's layers on `hidden`, except attention."""
    qkv, output, gate_up, down = stands
    residual = hidden
    quantizes = kind is Kind.FP8 and tuning.NORMS_QUANTIZE
    norm = fp8.quantized_rms_norm if quantizes else elementwise.add_rms_norm
    for layer in range(LAYERS):
        normed, residual = norm(hidden, residual, norm_weight, EPS)
        attended = multiply(kind, qkv, Inputs(normed, None), layer).hidden[:, : output.shape.inputs]
        hidden = multiply(kind, output, Inputs(attended, None), layer).hidden
        normed, residual = norm(hidden, residual, norm_weight, EPS)
        gated = multiply(kind, gate_up, Inputs(normed, None), layer)
        hidden = multiply(kind, down, Inputs(gated.hidden, gated.peaks), layer).hidden
    return hidden + residual


def seconds_of(kind: Kind, stand: Stand, inputs: Inputs, setting: Setting | None = None) -> float:
    """Microseconds of one product, in a graph over all layers."""

    def multiply_all() -> None:
        for layer in range(LAYERS):
            multiply(kind, stand, inputs, layer, setting)

    multiply(kind, stand, inputs, 0, setting)
    return seconds_of_graph(captured(multiply_all)) / LAYERS


def captured(act: Callable[[], object]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    return graph


def seconds_of_graph(graph: torch.cuda.CUDAGraph) -> float:
    times = []
    for _ in range(REPEATS):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(started.elapsed_time(ended) / 1e3)
    median: float = statistics.median(times[1:])
    return median


def check(kind: Kind, stand: Stand, inputs: Inputs, setting: Setting | None = None) -> None:
    """Raise if the numbers differ from the twin's, or between two runs."""
    expects = {Kind.PLAIN: stand.expected_plain, Kind.FP8: stand.expected_fp8, Kind.INT4: stand.expected_int4}
    expected = expects[kind](inputs.hidden)
    found = multiply(kind, stand, inputs, 0, setting).hidden
    error = float((found.float() - expected).norm() / expected.norm())
    where = f"{kind.value}, {stand.shape.name}, {inputs.hidden.shape[0]} tokens, {setting}"
    if not error < MAX_ERROR:
        raise AssertionError(f"{where}: off by {error:.4f} of the norm")
    if not torch.equal(multiply(kind, stand, inputs, 0, setting).hidden, found):
        raise AssertionError(f"{where}: another result the second time")


def compare(stands: Sequence[Stand], token_counts: Sequence[int]) -> list[dict[str, object]]:
    """Microseconds of each product, for every kind with the tiles that it chooses."""
    rows: list[dict[str, object]] = []
    for num_tokens in token_counts:
        for stand in stands:
            for kind in SEARCHED:
                check(kind, stand, stand.inputs(num_tokens, kind))
            times = {kind.value: 1e6 * seconds_of(kind, stand, stand.inputs(num_tokens, kind)) for kind in Kind}
            weights = stand.shape.inputs * stand.shape.outputs
            rates = {
                "fp8 TB/s": weights / times["fp8"] / 1e6,
                "int4 TB/s": weights * (0.5 + 2.5 / GROUP_SIZE) / times["int4"] / 1e6,
            }
            faster = min((Kind.CUBLAS, Kind.PLAIN), key=lambda kind: times[kind.value])
            wins = {} if stand.shape.is_gated else {"wins in 16 bits": "ours" if faster is Kind.PLAIN else "cuBLAS"}
            rows.append({"product": stand.shape.name, "tokens": num_tokens, **times, **rates, **wins})
        last = rows[-len(stands) :]
        sums = {kind.value: sum(float(str(row[kind.value])) for row in last) for kind in Kind}
        rows.append({"product": "layer", "tokens": num_tokens, **sums})
    return rows


def compare_layers(stands: Sequence[Stand], token_counts: Sequence[int]) -> list[dict[str, object]]:
    """Microseconds of a layer without its attention, with and without dependent launches.

    Raises if the numbers of a kind differ: neither the launches nor the place of quantisation may change them.
    """
    rows: list[dict[str, object]] = []
    for num_tokens, kind in itertools.product(token_counts, (Kind.CUBLAS, Kind.PLAIN, Kind.FP8)):
        expected: Tensor | None = None
        for norms_quantize in (False, True) if kind is Kind.FP8 else (False,):
            name = f"{kind.value}, norms quantise" if norms_quantize else kind.value
            times: dict[bool, float] = {}
            for overlaps in (False, True):
                with switched(DEPENDENT_LAUNCHES=overlaps, NORMS_QUANTIZE=norms_quantize):
                    times[overlaps], found = time_layers(kind, stands, num_tokens)
                if expected is not None and not torch.equal(found, expected):
                    raise AssertionError(f"{name}, {num_tokens} tokens: other numbers, overlapping: {overlaps}")
                expected = found
            figures = {"one by one": times[False], "overlapping": times[True], "x": times[False] / times[True]}
            rows.append({"layer of": name, "tokens": num_tokens, **figures})
    return rows


def time_layers(kind: Kind, stands: Sequence[Stand], num_tokens: int) -> tuple[float, Tensor]:
    """Microseconds of one layer, and the output of all."""
    norm_weight = torch.ones(stands[0].shape.inputs, dtype=DTYPE, device="cuda")
    hidden = stands[0].hidden[:num_tokens]
    out = torch.empty_like(hidden)
    run_layers(kind, stands, hidden, norm_weight)
    graph = captured(lambda: out.copy_(run_layers(kind, stands, hidden, norm_weight)))
    return 1e6 * seconds_of_graph(graph) / LAYERS, out


@contextmanager
def switched(**switches: bool) -> Iterator[None]:
    """Set switches of `kernels/tuning` meanwhile."""
    before = {name: getattr(tuning, name) for name in switches}
    for name, is_on in switches.items():
        setattr(tuning, name, is_on)
    try:
        yield
    finally:
        for name, is_on in before.items():
            setattr(tuning, name, is_on)


def search(
    kind: Kind, settings: Sequence[Setting], stands: Sequence[Stand], num_tokens: int, until: float
) -> dict[Setting, dict[str, float]]:
    """Microseconds by product of the settings tried within the time; kernels are compiled in threads."""
    found: dict[Setting, dict[str, float]] = {}
    inputs = [stand.inputs(num_tokens, kind) for stand in stands]
    now = time.monotonic()
    compiling_until = now + COMPILING_SHARE * (until - now)

    def compile_all(setting: Setting) -> bool:
        if time.monotonic() > compiling_until:
            return False
        for stand, its_inputs in zip(stands, inputs, strict=True):
            multiply(kind, stand, its_inputs, 0, setting)
        return True

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 12)) as pool:
        compiling: list[tuple[Setting, Future[bool]]] = [(one, pool.submit(compile_all, one)) for one in settings]
        for setting, compiled in compiling:
            try:
                compiled.result()
            except Exception as error:  # a tile that the GPU cannot hold must not end the search
                console.print(f"{kind.value} {setting}: {error}")
        torch.cuda.synchronize()
        for setting, compiled in compiling:
            if compiled.exception() is not None or not compiled.result() or time.monotonic() > until:
                continue
            for stand, its_inputs in zip(stands, inputs, strict=True):
                check(kind, stand, its_inputs, setting)
            found[setting] = {
                stand.shape.name: 1e6 * seconds_of(kind, stand, its_inputs, setting)
                for stand, its_inputs in zip(stands, inputs, strict=True)
            }
    return found


def settings_table(kind: Kind, num_tokens: int, found: dict[Setting, dict[str, float]]) -> list[dict[str, object]]:
    """The settings by their sum over the products of a layer, then the best one of each product."""
    rows: list[dict[str, object]] = [
        {"kind": kind.value, "tokens": num_tokens, **asdict(setting), **times, "layer": sum(times.values())}
        for setting, times in sorted(found.items(), key=lambda item: sum(item[1].values()))
    ]
    best = best_of_each(found)
    for name, setting in best.items():
        rows.append(
            {"kind": f"{kind.value}, best", "tokens": num_tokens, **asdict(setting), name: found[setting][name]}
        )
    if best:
        times = {name: found[setting][name] for name, setting in best.items()}
        rows.append(
            {"kind": f"{kind.value}, each its own", "tokens": num_tokens, **times, "layer": sum(times.values())}
        )
    return rows


def best_of_each(found: dict[Setting, dict[str, float]]) -> dict[str, Setting]:
    """The setting with which each product takes the least time."""
    best: dict[str, Setting] = {}
    for setting, times in found.items():
        for name, time_us in times.items():
            if name not in best or time_us < found[best[name]][name]:
                best[name] = setting
    return best


def search_all(
    kind: Kind, stands: Sequence[Stand], token_counts: Sequence[int], until: float
) -> list[dict[str, object]]:
    """`search` for the first number of tokens, and the best of each product for the others."""
    settings, _ = SEARCHED[kind]
    stands = [stand for stand in stands if not (kind is Kind.PLAIN and stand.shape.is_gated)]
    shuffled = random.Random(0).sample(settings, len(settings))  # so that the settings left out are random
    now = time.monotonic()
    first = search(kind, shuffled, stands, token_counts[0], now + FIRST_SHARE * (until - now))
    rows = settings_table(kind, token_counts[0], first)
    finalists = list(dict.fromkeys(best_of_each(first).values()))
    for num_tokens in token_counts[1:]:
        rows += settings_table(kind, num_tokens, search(kind, finalists, stands, num_tokens, until))
    print_table(f"{kind.value}: microseconds by setting; {len(first)} of {len(settings)} were tried", rows)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the result there; - for standard output")
    parser.add_argument("--seconds", type=float, default=60.0, help="after so long, no more tiles are tried (60)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="numbers of tokens")
    parser.add_argument(
        "--search",
        nargs="*",
        choices=[kind.value.replace(", ours", "") for kind in SEARCHED],
        default=[kind.value.replace(", ours", "") for kind in SEARCHED],
        help="whose tiles are looked for (all)",
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU", file=sys.stderr)
        return 2
    started_at = time.monotonic()
    stands = [Stand(shape, max(arguments.tokens)) for shape in SHAPES]
    result = Result("quantized_products", {"layers": LAYERS, "group_size": GROUP_SIZE, "tokens": arguments.tokens})
    result.rows = compare(stands, arguments.tokens)
    print_table("microseconds, tiles as kernels/tuning chooses them", result.rows)
    layers = compare_layers(stands, arguments.tokens)
    print_table("microseconds of a layer without its attention", layers)
    result.rows += layers
    kinds = [kind for kind in SEARCHED if kind.value.replace(", ours", "") in arguments.search]
    for number, kind in enumerate(kinds):
        now = time.monotonic()
        share = SEARCHED[kind][1] / sum(SEARCHED[other][1] for other in kinds[number:])
        until = now + share * (started_at + arguments.seconds - now)
        result.rows += search_all(kind, stands, arguments.tokens, until)
    layer = next(row for row in result.rows if row["product"] == "layer")
    for name in ("fp8", "int4"):
        result.figures[f"{name}_products_x"] = float(str(layer["bfloat16"])) / float(str(layer[name]))
    print_figures(result.figures, BARS)
    result.write(arguments.json)
    console.print(f"took {time.monotonic() - started_at:.0f} s")
    return int(any(result.figures[name] < float(bar.split()[1]) for name, bar in BARS.items()))


if __name__ == "__main__":
    sys.exit(main())
