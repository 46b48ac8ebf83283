"""Masks of 32 streams of one schema: the library's time for a step, with one copy of the grammar and with several.

    python -m benchmarks.structured.test_masks [--quick] [--threads N] [--json FILE]

Without an engine or a device. The tokens of 32 answers are drawn once, then each way makes the masks of the same steps,
from a freshly compiled grammar each time:

- one copy, texts tokenized: all matchers share one lexer and its lock, and every text that the grammar forces is
  tokenized in Python again;
- one copy: forced texts are kept;
- several copies: as many as threads make masks;
- several copies, no Python: the library tokenizes forced texts itself, as engines have it for byte-level tokenizers.

The last two are measured once more beside a thread in Python, which holds Python's lock for 0.5 ms from the beginning
of each step, as an engine does while masks are made. All ways must give the same masks. A step's time is the least of
its repeats, since other programs disturb. The figures compare the first way's CPU time with the second's, and the
second's wall time with the third's, which is at most the number of cores that are free; `no_python_wall_x` and
`no_python_cpu_x` compare the third with the fourth, both beside Python. `costly_pair_x` compares the wall time of two
costly masks, made by two threads, in one copy with that in two: 2 at best. They are so short that some are not
disturbed, unless the machine is very busy.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Result, finish, print_table
from benchmarks.structured.test_json_schema import SCHEMA
from benchmarks.structured.vocabulary import make_tokenizer
from kvtier.engine.constraint import vocabulary
from kvtier.engine.constraint.compiled import CompiledGrammar
from kvtier.engine.constraint.compiler import GrammarCompiler
from kvtier.engine.constraint.mask_thread import MaskThread
from kvtier.engine.grammar import Grammar
from kvtier.models.tokenizer import Tokenizer

_NUM_TOKENS = 151_000
_NUM_STREAMS = 32
_BARS = {"kept_texts_cpu_x": ">= 1.15", "no_python_cpu_x": ">= 0.9"}
_NEARLY_FULL = '[{"name":"' + 36 * "e"
"""Of 40 characters that the schema allows, so the library has to try most tokens."""
_NUM_PAIRS = 600
_BESIDE_S = 0.0005
"""On the H200 an engine's thread works about so long beside the masks of 32 streams."""
_FEW_CORES = 4
_PARALLEL_BARS = {"copies_wall_x": ">= 2", "costly_pair_x": ">= 1.3", "no_python_wall_x": ">= 1"}
"""For more cores than `_FEW_CORES`."""


class _AskedTokenizer(Tokenizer):
    """The library asks it for the tokens of forced texts."""

    byte_level_document = None


@dataclass(frozen=True)
class Way:
    name: str
    num_copies: int
    keeps_texts: bool = True
    asks_python: bool = True
    beside_s: float = 0.0


@dataclass
class Steps:
    """The least time of each step over the repeats, and a digest of all masks."""

    wall_s: npt.NDArray[np.float64]
    cpu_s: npt.NDArray[np.float64]
    digest: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller vocabulary, and fewer steps")
    parser.add_argument("--threads", type=int, default=min(16, len(os.sched_getaffinity(0))), help="default: the cores")
    parser.add_argument("--repeats", type=int, help="how often each step is measured; more where others disturb")
    parser.add_argument("--json", metavar="FILE", help="write the result there; - for standard output")
    arguments = parser.parse_args(argv)
    num_tokens, num_steps, repeats = (8000, 60, 2) if arguments.quick else (_NUM_TOKENS, 256, 5)
    repeats = arguments.repeats or repeats
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(num_tokens).save_pretrained(folder)
        tokenizers = (Tokenizer(Path(folder)), _AskedTokenizer(Path(folder)))
    settings = {"num_tokens": num_tokens, "num_steps": num_steps, "repeats": repeats, "threads": arguments.threads}
    result = Result("structured.test_masks", {**settings, "quick": arguments.quick})
    _measure(tokenizers, num_tokens, num_steps, repeats, arguments.threads, result)
    print_table(f"{_NUM_STREAMS} masks of {num_tokens} tokens, {arguments.threads} threads: ms of a step", result.rows)
    bars = _BARS | (_PARALLEL_BARS if arguments.threads > _FEW_CORES else {})
    return finish(result, {} if arguments.quick else bars, arguments.json)


def _measure(
    tokenizers: tuple[Tokenizer, Tokenizer],
    num_tokens: int,
    num_steps: int,
    repeats: int,
    num_threads: int,
    result: Result,
) -> None:
    own, asked = tokenizers
    (end,) = own.eos_token_ids
    compilers = {
        asks_python: GrammarCompiler(one, num_tokens, [end]) for asks_python, one in ((True, asked), (False, own))
    }
    executor = importlib.import_module("llguidance").LLExecutor(num_threads)
    ways = (
        Way("one copy, texts tokenized", 1, keeps_texts=False),
        Way("one copy", 1),
        Way("several copies", num_threads),
        Way("several copies, no Python", num_threads, asks_python=False),
        Way("several copies, beside Python", num_threads, beside_s=_BESIDE_S),
        Way("several copies, no Python, beside it", num_threads, asks_python=False, beside_s=_BESIDE_S),
    )
    grammars = compilers[True]
    answers = _answers(_compile(grammars, 1), num_tokens, num_steps)
    done: dict[str, Steps] = {}
    for repeat in range(repeats):
        for way in ways if repeat % 2 else reversed(ways):
            with _keeping_texts(way.keeps_texts):
                compiled = _compile(compilers[way.asks_python], way.num_copies)
                steps = _run(compiled, answers, executor, way.beside_s)
            former = done.setdefault(way.name, steps)
            former.wall_s = np.minimum(former.wall_s, steps.wall_s)
            former.cpu_s = np.minimum(former.cpu_s, steps.cpu_s)
            if former.digest != steps.digest:
                raise RuntimeError(f"masks differ between repeats of {way.name}")
    if len({steps.digest for steps in done.values()}) != 1:
        raise RuntimeError("the ways do not make the same masks")
    for name, steps in done.items():
        row: dict[str, object] = {"way": name}
        for kind, seconds in (("wall", steps.wall_s), ("CPU", steps.cpu_s)):
            row[f"{kind}, mean"] = round(1000 * float(seconds.mean()), 3)
            row[f"{kind}, 99th"] = round(1000 * float(np.percentile(seconds, 99)), 3)
        result.rows.append(row)
    before, kept, copies, _, beside, freed = (done[way.name] for way in ways)
    result.figures["kept_texts_cpu_x"] = float(before.cpu_s.sum() / kept.cpu_s.sum())
    result.figures["copies_wall_x"] = float(kept.wall_s.sum() / copies.wall_s.sum())
    result.figures["no_python_wall_x"] = float(beside.wall_s.sum() / freed.wall_s.sum())
    result.figures["no_python_cpu_x"] = float(beside.cpu_s.sum() / freed.cpu_s.sum())
    shared_s, apart_s = (_costly_pair_s(_compile(grammars, count), own) for count in (1, 2))
    result.rows += [
        {"way": f"two costly masks, {name}", "wall, least": round(1000 * seconds, 3)}
        for name, seconds in (("one copy", shared_s), ("two copies", apart_s))
    ]
    result.figures["costly_pair_x"] = shared_s / apart_s
    result.figures["all_wall_x"] = float(before.wall_s.sum() / copies.wall_s.sum())


def _compile(grammars: GrammarCompiler, num_copies: int) -> CompiledGrammar:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    grammars.drop(grammar)
    compiled = grammars.compile(grammar)
    compiled.announce(num_copies - 1, num_copies)
    if compiled.num_copies != num_copies:
        raise RuntimeError(f"there are {compiled.num_copies} copies of the grammar, not {num_copies}")
    return compiled


def _answers(compiled: CompiledGrammar, num_tokens: int, num_steps: int) -> list[list[int]]:
    """Drawn from the allowed tokens: for each step, one token of each stream."""
    dice = np.random.default_rng(0)
    matchers = [compiled.take_copy().matcher() for _ in range(_NUM_STREAMS)]
    words = np.zeros(compiled.num_words, np.int32)
    steps = []
    for _ in range(num_steps):
        tokens = []
        for matcher in matchers:
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:num_tokens])
            tokens.append(int(dice.choice(allowed)))
            matcher.consume_token(tokens[-1])
        steps.append(tokens)
    return steps


def _run(compiled: CompiledGrammar, answers: list[list[int]], executor: Any, beside_s: float) -> Steps:
    """With `beside_s`, another thread waits for the library, and this one is in Python so long."""
    thread = MaskThread()
    try:
        return _run_beside(compiled, answers, executor, thread, beside_s)
    finally:
        thread.close()


def _run_beside(
    compiled: CompiledGrammar, answers: list[list[int]], executor: Any, thread: MaskThread, beside_s: float
) -> Steps:
    copies = [compiled.take_copy() for _ in range(_NUM_STREAMS)]
    matchers = [copy.matcher() for copy in copies]
    order = sorted(range(_NUM_STREAMS), key=lambda number: id(copies[number]))
    words = np.zeros((_NUM_STREAMS, compiled.num_words), np.int32)
    digest = hashlib.sha256()
    wall_s, cpu_s = [], []
    for tokens in answers:
        pairs = [(matchers[number], number) for number in order]
        wall_at, cpu_at = time.perf_counter(), time.process_time()
        make = functools.partial(
            executor.unsafe_compute_mask_ptr, pairs, words.ctypes.data, 4 * words.shape[1], len(words)
        )
        if beside_s:
            thread.begin(make)
            _stay_in_python(beside_s)
            thread.wait()
        else:
            make()
        cpu_s.append(time.process_time() - cpu_at)
        wall_s.append(time.perf_counter() - wall_at)
        digest.update(words.tobytes())
        for matcher, token_id in zip(matchers, tokens, strict=True):
            if not matcher.consume_token(token_id):
                raise RuntimeError(f"a drawn token was refused: {matcher.get_error()}")
    return Steps(np.array(wall_s), np.array(cpu_s), digest.hexdigest())


def _costly_pair_s(compiled: CompiledGrammar, tokenizer: Tokenizer) -> float:
    """The least time of many. The last mask of a matcher is kept, so a character is added and taken back in between."""
    executor = importlib.import_module("llguidance").LLExecutor(2)
    matchers = [compiled.take_copy().matcher() for _ in range(2)]
    (more,) = tokenizer.encode("e", add_special_tokens=False)
    for matcher in matchers:
        for character in _NEARLY_FULL:
            if not matcher.consume_tokens(tokenizer.encode(character, add_special_tokens=False)):
                raise RuntimeError(f"the schema does not allow {_NEARLY_FULL}: {matcher.get_error()}")
    words = np.zeros((2, compiled.num_words), np.int32)
    seconds = []
    for number in range(_NUM_PAIRS):
        started_at = time.perf_counter()
        executor.unsafe_compute_mask_ptr(
            [(matcher, place) for place, matcher in enumerate(matchers)], words.ctypes.data, 4 * words.shape[1], 2
        )
        if number % 2 == 0:
            seconds.append(time.perf_counter() - started_at)
        for matcher in matchers:
            matcher.rollback(1) if number % 2 else matcher.consume_token(more)
    return min(seconds)


def _stay_in_python(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@contextlib.contextmanager
def _keeping_texts(keeps: bool) -> Iterator[None]:
    had = vocabulary.MAX_KEPT_CHARACTERS
    vocabulary.MAX_KEPT_CHARACTERS = had if keeps else -1
    try:
        yield
    finally:
        vocabulary.MAX_KEPT_CHARACTERS = had


if __name__ == "__main__":
    sys.exit(main())
