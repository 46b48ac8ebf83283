"""Load or compute: the time to the first token with either, and with the decision, over prompt lengths and tiers.

    python -m benchmarks.remote_kv_cache.test_load_or_compute [--quick] [--json FILE]

Each prompt is stored in the tier once; then it is asked for again with one token out by three engines in turn: one
without tiers, one that always loads, and one that decides. The device's own cache is off. Links of several speeds, down
to far slower than computing, stand between the engine and a server over TCP; a load that misses the
client's deadline counts as never finished (inf). `decision_worst` is the worst ratio of the decision to the better of
the two, where 2 ms more count as 5%: 1.05 is the bar.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import Result, console, print_figures, print_table
from benchmarks.model_configs import model_folder
from benchmarks.prefix_caching.engine_stand import PromptMaker, kv_bytes_of
from benchmarks.prefix_caching.options import device_settings, make_parser, parse
from benchmarks.slow_link import slow_link
from kvtier import LLM, SamplingParams
from kvtier.testing.servers import cache_server
from kvtier.tiers.host import HostTier

BAR = 1.05
SLACK_S = 0.002
MODES = ("compute", "load", "decide")
_SLOW = "TCP at"
_TRIES = 4
_PATIENCE_S = 300.0
LINKS = (2.0, 1.0, 0.4, 0.1)
"""Speeds of slow links, as multiples of the rate at which computing makes KV."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    lengths: tuple[int, ...]
    repeats: int
    warm_ups: int
    links: tuple[float, ...]


SIZES = {
    "cpu": Size((48, 256, 1024, 2048), 9, 4, LINKS),
    "cuda": Size((512, 2048, 8192, 30000), 7, 3, LINKS),
}
QUICK = {
    "cpu": Size((64, 512), 9, 3, (1.0, 0.1)),
    "cuda": Size((512, 8192), 5, 2, (1.0, 0.1)),
}


@dataclass(frozen=True)
class Cell:
    """Median seconds to the first token of one prompt from one tier."""

    tier: str
    length: int
    seconds: dict[str, float]
    num_loaded: int

    @property
    def best(self) -> float:
        return min(self.seconds["compute"], self.seconds["load"])

    @property
    def score(self) -> float:
        """1.05 is 5% or 2 ms more than the better one, whichever is more."""
        excess = self.seconds["decide"] - self.best
        return 1 + min(excess / self.best, (BAR - 1) * excess / SLACK_S)


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--plot", metavar="FILE", help="draw the times over the lengths of prompts")
    arguments = parse(parser)
    device = arguments.device
    size = (QUICK if arguments.quick else SIZES)[device]
    result = Result("remote_kv_cache.test_load_or_compute", {**vars_of(arguments), "size": str(size)})
    cells = measure(arguments, size)
    for cell in cells:
        result.rows.append(
            {
                "tier": cell.tier,
                "tokens": cell.length,
                **{f"{mode} ms": f"{1000 * cell.seconds[mode]:.2f}" for mode in MODES},
                "loaded": cell.num_loaded,
                "decision / better": f"{cell.seconds['decide'] / cell.best:.3f}",
                "score": f"{cell.score:.3f}",
            }
        )
    result.figures["decision_worst"] = max(cell.score for cell in cells)
    print_table("time to the first token, medians", result.rows)
    print_figures(result.figures, {"decision_worst": f"<= {BAR}"})
    result.write(arguments.json)
    if arguments.plot:
        plot(cells, Path(arguments.plot))
    return 0


def vars_of(arguments: argparse.Namespace) -> dict[str, object]:
    return {"shape": arguments.model_shape, "device": arguments.device, **device_settings(arguments.device)}


def measure(arguments: argparse.Namespace, size: Size) -> list[Cell]:
    device, shape = arguments.device, arguments.model_shape
    if device == "cpu":
        torch.set_num_threads(1)
    cells: list[Cell] = []
    with model_folder(shape) as folder:
        room = kv_bytes_of(shape, 2 * max(size.lengths), 4 if device == "cpu" else 2)
        stand = _Stand(folder, device, room)
        with stand.compute:
            rate = stand.kv_bytes_per_s(max(size.lengths))
            for tier, settings in _tiers(size, rate, 16 * room):
                with settings as found:
                    console.print(f"{tier} ...")
                    cells += stand.measure(tier, found, size)
                gc.collect()  # engines of the last tier give their memory back
    return cells


def _tiers(
    size: Size, rate: float, memory: int
) -> Iterator[tuple[str, contextlib.AbstractContextManager[dict[str, object]]]]:
    yield "host", contextlib.nullcontext({"swap_space": memory})
    yield "server", _server(memory)
    yield "server over TCP", _server(memory, link=0.0)
    for speed in size.links:
        yield f"{_SLOW} {speed:g}x of computing", _server(memory, link=speed * rate)
    yield "disk", _server(memory, has_disk=True)


@contextlib.contextmanager
def _server(memory: int, *, link: float | None = None, has_disk: bool = False) -> Iterator[dict[str, object]]:
    with contextlib.ExitStack() as stack:
        options: list[str] = ["--max-leased", str(memory)]
        if has_disk:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-", dir="."))
            options += ["--folder", folder, "--disk", str(4 * memory), "--disk-only"]
        server = stack.enter_context(cache_server(*options, memory=str(memory), tcp=link is not None))
        if link is None:
            yield {"cache_server": server.unix}
            return
        address = stack.enter_context(slow_link(server.tcp, link)) if link else server.tcp
        yield {"cache_server": address, "cache_server_token": server.token, "direct": server.tcp}


class _Stand:
    """Engines with the same weights: one that computes, and two more for each tier."""

    def __init__(self, folder: str, device: str, room: int) -> None:
        self._folder = folder
        self._settings = {
            "load_format": "dummy",
            "device": device,
            "kv_cache_space": room,
            "block_manager": "disable_prefix_caching",
            "max_num_requests": 8,
        }
        self._late: set[int] = set()
        """Lengths of prompts that are too late over the current slow link."""
        self._is_exact = device == "cpu"
        """In bfloat16, random weights make ties that fall either way; tests/gpu compares answers in float32."""
        self.compute = LLM(folder, **self._settings)
        engine = self.compute.engine
        self._prompts = PromptMaker(engine.loaded.config.vocab_size, seed=7)
        self._block_bytes = engine.arena.layout.block_bytes

    def kv_bytes_per_s(self, length: int) -> float:
        """Bytes of KV computed per second."""
        (prompt,) = self._prompts.make(1, length)
        self._ask(self.compute, prompt)
        seconds = statistics.median(self._ask(self.compute, prompt)[0] for _ in range(3))
        return length / 16 * self._block_bytes / seconds

    def measure(self, tier: str, found: dict[str, object], size: Size) -> Iterator[Cell]:
        direct = found.pop("direct", None)
        is_slow = tier.startswith(_SLOW)
        self._late.clear()
        prompts = [self._prompts.make(1, length)[0] for length in size.lengths]
        if direct is not None:  # stored past the slow link
            with self._engine(found | {"cache_server": direct}) as storing:
                self._store(storing, prompts)
        with self._engine(found | {"always_load": True}) as load, self._engine(found) as decide:
            engines = {"compute": self.compute, "load": load, "decide": decide}
            if direct is None:
                for engine in (load, decide):
                    self._store(engine, prompts)
            for _ in range(size.warm_ups):
                for prompt in prompts:
                    self._race(engines, prompt, is_slow=is_slow)
            seconds: list[dict[str, list[float]]] = [{mode: [] for mode in MODES} for _ in prompts]
            loaded = [0] * len(prompts)
            for _ in range(size.repeats):
                for number, prompt in enumerate(prompts):
                    times, loaded[number] = self._race(engines, prompt, is_slow=is_slow)
                    for mode in MODES:
                        seconds[number][mode].append(times[mode])
            for length, times_of, num_loaded in zip(size.lengths, seconds, loaded, strict=True):
                medians = {mode: statistics.median(times_of[mode]) for mode in MODES}
                yield Cell(tier, length, medians, num_loaded)

    def _engine(self, settings: dict[str, object]) -> LLM:
        return LLM(self._folder, **self._settings, **settings)

    def _store(self, llm: LLM, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self._ask(llm, prompt)
        if not llm.engine.transfer.settle(_PATIENCE_S):
            raise RuntimeError(f"the prompts are not stored within {_PATIENCE_S:.0f} s")

    def _race(self, engines: dict[str, LLM], prompt: list[int], *, is_slow: bool) -> tuple[dict[str, float], int]:
        """Seconds of each engine, and the tokens that the deciding one loaded. Checks that all answers are equal."""
        seconds: dict[str, float] = {}
        answers = set()
        num_loaded = 0
        for mode, llm in engines.items():
            if mode == "load":
                seconds[mode], answer, cached = self._ask_loaded(llm, prompt, is_slow=is_slow)
            else:
                seconds[mode], answer, cached = self._ask(llm, prompt)
            answers.add(answer)
            if mode == "decide":
                num_loaded = cached
        if len(answers) > 1 and self._is_exact:
            raise RuntimeError("the answers differ")
        return seconds, num_loaded

    def _ask_loaded(self, llm: LLM, prompt: list[int], *, is_slow: bool) -> tuple[float, int, int]:
        """Like `_ask`, for a prompt that is loaded whole.

        On a busy machine a tier may answer too late and is skipped for a while: such a turn does not count.
        """
        for attempt in range(_TRIES):
            time.sleep(attempt)
            seconds, answer, cached = self._ask(llm, prompt)
            if cached >= (len(prompt) - 1) // 16 * 16:
                return seconds, answer, cached
            if len(prompt) in self._late:
                return math.inf, answer, cached
        if is_slow:
            self._late.add(len(prompt))
            return math.inf, answer, cached
        raise RuntimeError(f"in {_TRIES} turns only {cached} of {len(prompt)} tokens were loaded")

    def _ask(self, llm: LLM, prompt: list[int]) -> tuple[float, int, int]:
        """Seconds, the first token, and the number of prompt tokens that were not computed."""
        _forget_host(llm)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        started_at = time.perf_counter()
        (output,) = llm.generate([prompt], params, progress=False)
        seconds = time.perf_counter() - started_at
        return seconds, output.outputs[0].token_ids[0], sum(output.outputs[0].cached_tokens.values())


def _forget_host(llm: LLM) -> None:
    """Empty the host tier, so that blocks loaded over TCP are loaded over TCP again."""
    traffic = llm.engine.transfer.traffic
    if traffic is None:
        return
    traffic.settle()
    tiers = [guard.tier for guard in traffic.hierarchy.guards]
    if len(tiers) > 1 and isinstance(tiers[0], HostTier):
        tiers[0].drop()


def plot(cells: list[Cell], path: Path) -> None:
    """Draw a picture per tier: the three times over the prompt's length."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    tiers = list(dict.fromkeys(cell.tier for cell in cells))
    figure = Figure(figsize=(4 * len(tiers), 3.5), layout="constrained")
    for number, tier in enumerate(tiers):
        axes = figure.add_subplot(1, len(tiers), number + 1)
        own = [cell for cell in cells if cell.tier == tier]
        for mode in MODES:
            axes.plot([cell.length for cell in own], [1000 * cell.seconds[mode] for cell in own], "o-", label=mode)
        axes.set(title=tier, xlabel="prompt tokens", ylabel="ms to the first token", xscale="log", yscale="log")
        axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
