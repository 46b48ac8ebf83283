"""Time to first token of real vLLM on a CPU, for long prompts that were mostly computed before.

    .venv-vllm/bin/python -m benchmarks.vllm.test_ttft [--quick] [--json FILE]

1,920 repeated tokens and a few new ones. The contenders: no connector, vLLM's own offloading with its tier of files,
kvtier with a cache server, and LMCache's daemon if it is installed. The states: cold; vLLM's own prefix
cache; after `reset_prefix_cache`; in a new engine process; after a restart of the cache server, from its disk; vLLM's
counterpart is its files. The engines take turns prompt by prompt, each when the others' work is done.
Then the same with 7,680 tokens for vLLM alone and with kvtier: on a fast core, vLLM's own overhead is most of a hit of
1,920, and `own prefix` is the best that any cache could reach.

The run fails unless every answer equals that of the engine without a connector and every expected hit is one.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, console, finish, print_table
from benchmarks.vllm.lmcache_daemon import lmcache_daemon, why_no_lmcache
from benchmarks.vllm.quiet import OtherWork, wait_until_quiet
from benchmarks.vllm.stand import (
    LONG_TOKENS,
    REUSED_TOKENS,
    TAIL_TOKENS,
    Answer,
    VllmEngine,
    kv_bytes_per_token,
    kvtier_transfer,
    native_transfer,
    save_model,
    stand_settings,
    tokens_of,
)
from kvtier.testing.servers import cache_server

NO_CONNECTOR, NATIVE, KVTIER, LMCACHE = "no connector", "vLLM offload", "kvtier", "LMCache"
COLD, OWN, RESET, NEW_ENGINE, NEW_SERVER = "cold", "own prefix", "reset", "new engine", "new server"
LONG_COLD, LONG_OWN, LONG_NEW_ENGINE = "long, cold", "long, own prefix", "long, new engine"
STATES = (COLD, OWN, RESET, NEW_ENGINE, NEW_SERVER, LONG_COLD, LONG_OWN, LONG_NEW_ENGINE)
BARS = {
    "vllm_reset_over_native": "<= 1.4",
    "vllm_restart_over_native": "<= 1.4",
    "vllm_server_restart_over_native": "<= 1.4",
    "vllm_restart_x": ">= 25",
    "vllm_restart_long_x": ">= 25",
}
_KV_BYTES = REUSED_TOKENS * kv_bytes_per_token()
_MEMORY_BYTES = 2 << 30
_SERVER_OPTIONS = ("--disk", "8GiB")

Engines = Mapping[str, VllmEngine]


@dataclass
class Measurement:
    """Seconds to the first token by contender and state, and the answers of the engine without a connector."""

    seconds: defaultdict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    answers: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    others: OtherWork = field(default_factory=OtherWork)

    def learn(self, engine: VllmEngine, prompt: str, states: Sequence[str]) -> None:
        """The right answers, from the engine without a connector; the first state is cold."""
        for number, state in enumerate(states):
            answer = self._ask(engine, prompt, state)
            assert answer.num_cached == (_reused_tokens(prompt) if number else 0)
            self.answers[prompt, state] = answer.tokens
            if number == 0:
                self._keep(NO_CONNECTOR, prompt, state, answer.first_token_s)
            elif number == 1:
                self._keep(NO_CONNECTOR, prompt, LONG_OWN if _is_long(prompt) else OWN, answer.first_token_s)

    def ask(self, engine: VllmEngine, contender: str, prompt: str, state: str) -> None:
        answer = self._ask(engine, prompt, state)
        expected = 0 if state in (COLD, LONG_COLD) else _reused_tokens(prompt)
        if answer.num_cached != expected:
            raise AssertionError(f"{contender}, {state}: {answer.num_cached} tokens were cached, not {expected}")
        if answer.tokens != self.answers[prompt, state]:
            raise AssertionError(f"{contender}, {state}: the answer to prompt {prompt} is another")
        self._keep(contender, prompt, state, answer.first_token_s)

    def median(self, contender: str, state: str) -> float:
        return statistics.median(self.seconds[contender, state])

    def _ask(self, engine: VllmEngine, prompt: str, state: str) -> Answer:
        wait_until_quiet()
        with self.others.watched():
            return engine.ask(_tokens(prompt, state))

    def _keep(self, contender: str, prompt: str, state: str, seconds: float) -> None:
        if prompt.startswith("warm-up"):
            return
        self.seconds[contender, state].append(seconds)
        console.print(f"  {prompt}, {state}, {contender}: {1000 * seconds:.1f} ms")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    repeats = arguments.repeats or (3 if arguments.quick else 7)
    with tempfile.TemporaryDirectory(prefix="kvtier-vllm-", dir=arguments.folder) as scratch:
        model = Path(scratch, "model")
        num_parameters = save_model(model)
        console.print(f"{num_parameters / 1e6:.1f}M parameters, {_KV_BYTES / 1e6:.1f} MB of KV, {repeats} repeats")
        found = measure(model, Path(scratch), repeats, arguments.without)
    settings = stand_settings() | {
        "parameters": num_parameters,
        "reused_tokens": REUSED_TOKENS,
        "long_tokens": LONG_TOKENS,
        "fresh_tokens": TAIL_TOKENS,
        "kv_bytes": _KV_BYTES,
        "repeats": repeats,
        "quick": arguments.quick,
        "others_cpu": round(found.others.share, 3),
        "lmcache": "left out" if LMCACHE in arguments.without else why_no_lmcache() or "measured",
        "bars": BARS,
    }
    result = Result("vllm.test_ttft", settings, _rows(found), _figures(found))
    print_table(f"time to first token, {REUSED_TOKENS} tokens again and {TAIL_TOKENS} new ones", result.rows)
    found.others.tell(console.print)
    return finish(result, BARS, arguments.json)


def measure(model: Path, scratch: Path, repeats: int, without: Sequence[str] = ()) -> Measurement:
    """Prompts A are sent in every state but the last; prompts B cold and in the last, when only disks have them."""
    found = Measurement()
    prompts_a = ["warm-up A", *(f"A{number}" for number in range(repeats))]
    prompts_b = ["warm-up B", *(f"B{number}" for number in range(repeats))]
    long_prompts = [f"long {number}" for number in range(-(-repeats // 2))]
    folders = {name: scratch / name for name in ("native", "kvtier", "socket", "lmcache")}
    for folder in folders.values():
        folder.mkdir()
    with contextlib.ExitStack() as stack:
        transfers: dict[str, Any] = {NATIVE: native_transfer(folders["native"], _MEMORY_BYTES)}
        if LMCACHE not in without and why_no_lmcache() is None:
            transfers[LMCACHE] = stack.enter_context(lmcache_daemon(folders["lmcache"], _MEMORY_BYTES))
        with contextlib.ExitStack() as engine_stack:
            with _server(folders) as address:
                transfers[KVTIER] = kvtier_transfer(address)
                _run_first_engines(found, model, transfers, prompts_a, prompts_b, long_prompts)
                engines = engine_stack.enter_context(_engines(model, transfers))
                console.print("new engine processes")
                for prompt in prompts_a:
                    _take_turns(found, engines, prompt, NEW_ENGINE)
                for prompt in long_prompts:
                    found.ask(engines[KVTIER], KVTIER, prompt, LONG_NEW_ENGINE)
            console.print("a new cache server on the same folder")
            with _server(folders):
                for prompt in prompts_b:
                    _take_turns(found, {name: engines[name] for name in (NATIVE, KVTIER)}, prompt, NEW_SERVER)
                engine_stack.close()
    return found


def _run_first_engines(
    found: Measurement,
    model: Path,
    transfers: Mapping[str, Any],
    prompts_a: Sequence[str],
    prompts_b: Sequence[str],
    long_prompts: Sequence[str],
) -> None:
    """Cold, own prefix and reset, with empty caches at first."""
    with _engines(model, {NO_CONNECTOR: None, **transfers}) as everything:
        engines = dict(everything)
        plain = engines.pop(NO_CONNECTOR)
        for prompt in prompts_a:
            found.learn(plain, prompt, (COLD, OWN, RESET, NEW_ENGINE))
            _take_turns(found, engines, prompt, COLD)
            _take_turns(found, engines, prompt, OWN)
            wait_until_quiet()
            for engine in engines.values():
                engine.forget_prefixes()
            _take_turns(found, engines, prompt, RESET)
        for prompt in prompts_b:
            found.learn(plain, prompt, (COLD, NEW_SERVER))
            _take_turns(found, engines, prompt, COLD)
        for prompt in long_prompts:
            found.learn(plain, prompt, (LONG_COLD, LONG_NEW_ENGINE))
            found.ask(engines[KVTIER], KVTIER, prompt, LONG_COLD)
        wait_until_quiet()


def _take_turns(found: Measurement, engines: Engines, prompt: str, state: str) -> None:
    """The first contender changes from prompt to prompt."""
    names = list(engines)
    first = len(found.seconds[KVTIER, state]) % len(names)
    for name in names[first:] + names[:first]:
        found.ask(engines[name], name, prompt, state)


@contextlib.contextmanager
def _engines(model: Path, transfers: Mapping[str, Any]) -> Iterator[Engines]:
    with contextlib.ExitStack() as stack:
        engines = {}
        for name, transfer in transfers.items():
            console.print(f"starting an engine: {name}")
            engines[name] = VllmEngine(model, transfer)
            stack.callback(engines[name].close)
        yield engines


@contextlib.contextmanager
def _server(folders: Mapping[str, Path]) -> Iterator[str]:
    """A cache server; its address and what it holds on disk outlive it."""
    options = ("--folder", str(folders["kvtier"]), *_SERVER_OPTIONS)
    with cache_server(*options, memory=str(_MEMORY_BYTES), folder=folders["socket"]) as server:
        yield server.unix


def _tokens(prompt: str, state: str) -> list[int]:
    return tokens_of(_reused_tokens(prompt), prompt) + tokens_of(TAIL_TOKENS, prompt, state)


def _is_long(prompt: str) -> bool:
    return prompt.startswith("long")


def _reused_tokens(prompt: str) -> int:
    return LONG_TOKENS if _is_long(prompt) else REUSED_TOKENS


def _figures(found: Measurement) -> dict[str, float]:
    return {
        "vllm_reset_over_native": found.median(KVTIER, RESET) / found.median(NATIVE, RESET),
        "vllm_restart_over_native": found.median(KVTIER, NEW_ENGINE) / found.median(NATIVE, NEW_ENGINE),
        "vllm_server_restart_over_native": found.median(KVTIER, NEW_SERVER) / found.median(NATIVE, NEW_SERVER),
        "vllm_restart_x": found.median(NO_CONNECTOR, COLD) / found.median(KVTIER, NEW_ENGINE),
        "vllm_own_prefix_x": found.median(NO_CONNECTOR, COLD) / found.median(NO_CONNECTOR, OWN),
        "vllm_restart_long_x": found.median(NO_CONNECTOR, LONG_COLD) / found.median(KVTIER, LONG_NEW_ENGINE),
        "vllm_own_prefix_long_x": found.median(NO_CONNECTOR, LONG_COLD) / found.median(NO_CONNECTOR, LONG_OWN),
    }


def _rows(found: Measurement) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for state in STATES:
        cold = found.median(NO_CONNECTOR, LONG_COLD if state.startswith("long") else COLD)
        for contender in (NO_CONNECTOR, NATIVE, LMCACHE, KVTIER):
            seconds = found.seconds.get((contender, state))
            if seconds:
                rows.append(
                    {
                        "state": state,
                        "engine": contender,
                        "median s": round(statistics.median(seconds), 4),
                        "least": round(min(seconds), 4),
                        "most": round(max(seconds), 4),
                        "cold over this": round(cold / statistics.median(seconds), 1),
                        "prompts": len(seconds),
                    }
                )
    return rows


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer prompts")
    parser.add_argument("--json", metavar="FILE", help="write the result there; - for standard output")
    parser.add_argument("--repeats", type=int, help="prompts for each state (7; 3 with --quick)")
    parser.add_argument("--without", action="append", default=[], choices=(LMCACHE,), help="leave out this peer")
    parser.add_argument("--folder", metavar="DIRECTORY", help="where the tiers on disk are made, and removed again")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
