"""The command-line options of the engine's benchmarks, and their description of the machine."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.harness import Result, finish
from benchmarks.model_configs import MODEL_CONFIGS, SMALL_SHAPE

GPU_SHAPE = "Qwen2.5-7B"


def make_parser(description: str, gpu_shape: str = GPU_SHAPE) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer prompts and repeats")
    parser.add_argument("--json", metavar="FILE", help="write the result there; - for standard output")
    parser.add_argument("--repeats", type=int, help="how often each row of a table is measured")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if present")
    parser.add_argument(
        "--model-shape",
        choices=tuple(MODEL_CONFIGS),
        help=f"random weights of this shape ({gpu_shape} on a GPU, {SMALL_SHAPE} on a CPU)",
    )
    parser.set_defaults(gpu_shape=gpu_shape)
    parser.add_argument("--prompts", type=int, help="how many prompts at once")
    parser.add_argument("--max-num-requests", type=int, help="how many requests run at a time")
    parser.add_argument("--max-num-batched-tokens", type=int, help="how many tokens one step computes at most")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, with device and shape filled in."""
    arguments = parser.parse_args(argv)
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments.model_shape = arguments.model_shape or (
        arguments.gpu_shape if arguments.device == "cuda" else SMALL_SHAPE
    )
    return arguments


def device_settings(device: str, cpu_clock: str = "CPU time of the process") -> dict[str, object]:
    """The machine, in addition to what the harness records."""
    versions = {name: _version(name) for name in ("torch", "triton", "transformers")}
    if device == "cuda":
        return {"device": torch.cuda.get_device_name(), **versions}
    return {"device": "cpu", "torch_threads": 1, "clock": cpu_clock, **versions}


def is_h200(device: str) -> bool:
    """The machine on which vLLM was measured for this project."""
    return device == "cuda" and "H200" in torch.cuda.get_device_name()


def conclude(result: Result, arguments: argparse.Namespace, bars: Mapping[str, str], act: Callable[[], object]) -> int:
    """Measure with `act`, show the figures beside their bars, write the result. Returns 1 if a bar is missed.

    Results from before a failure are written, too.
    """
    result.settings = {**result.settings, "bars": dict(bars)}
    try:
        act()
    except BaseException:
        result.write(arguments.json)
        raise
    return finish(result, bars, arguments.json)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
