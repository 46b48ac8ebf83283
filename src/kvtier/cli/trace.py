"""`kvtier trace`: record the requests to a cache server, and convert traces from other sources."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import click

from kvtier.cli.connection_options import ConnectionOptions, connection_options
from kvtier.cli.size_parameter import SizeParameter
from kvtier.errors import ConfigError, KvtierError
from kvtier.observe.printable import printable
from kvtier.planning.recording import Recorder
from kvtier.planning.trace_file import new_trace
from kvtier.planning.trace_forms import FORMS, block_tokens_of, coarsened, form_of, read_form

_TIMEOUT_S = 30.0
_LONGEST = 2000
_MAX_CONVERTED_BYTES = 1 << 40


@click.group("trace", short_help="Record traffic as a trace; convert other traces.")
def trace() -> None:
    """Traces of requests for `kvtier plan` and simulations: block hashes and lengths, never text."""


@trace.command(short_help="Write what a running cache server is asked for.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--namespace", default="", metavar="DIGEST", help="The beginning of a namespace.  [default: the first seen]"
)
@click.option(
    "--max-size", type=SizeParameter(), default="1GiB", show_default=True, help="Stop before the lines are larger."
)
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="Stop after this time.  [default: Ctrl-C]")
@connection_options
def record(file: Path, namespace: str, max_size: int, seconds: float | None, reach: ConnectionOptions) -> None:
    """Write what a running cache server is asked for to FILE, until Ctrl-C.

    FILE must be new; one that ends in .gz is compressed. A prompt is written as numbers of its full blocks, which
    cannot be traced back to a text: the key that they were made with is forgotten. Hits in an engine's own GPU memory
    cause no request to the server, and are not in the trace.
    """
    if namespace.strip("0123456789abcdefABCDEF"):
        raise click.BadParameter("a namespace is written in hexadecimal digits", param_hint="--namespace")
    with _one_sentence(), reach.connect(_TIMEOUT_S) as client, _stopping(seconds) as stop:
        recorder = Recorder(client, namespace)
        with new_trace(file, max_size) as written:
            click.echo(f"recording what {reach.address} is asked for into {file}; Ctrl-C ends it", err=True)
            recorder.run(written, stop, lambda count: _tell(count, stop))
        recorded = recorder.recorded
        click.echo(f"{written.num_requests} requests in {file}" + (", which is full" if written.is_full else ""))
        if recorded.num_lost:
            click.echo(f"{recorded.num_lost} requests came faster than they could be fetched, and are missing")
        for digest, count in recorded.others.most_common(10):
            click.echo(f"left out: {count} requests of namespace {digest[:12]} (record it with --namespace)")


@trace.command(short_help="Convert a trace of another form into ours.")
@click.argument("source", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--from", "form", type=click.Choice(FORMS), help="The form of SOURCE.  [default: by its first line]")
@click.option("--block-tokens", type=click.IntRange(1, 1 << 20), help="Join blocks into larger ones.")
def convert(source: Path, target: Path, form: str | None, block_tokens: int | None) -> None:
    """Convert SOURCE into a trace that kvtier reads, TARGET, in order of arrival as SOURCE has it.

    Mooncake's traces (with `session` or `session_id`, or without) and Qwen-Bailian's usage traces are known; both may
    be compressed with gzip. Blocks stay as large as they are (512 and 16 tokens) unless --block-tokens asks for a
    multiple.
    """
    with _one_sentence():
        form = form_of(source) if form is None else form
        own_tokens = block_tokens_of(form)
        factor, rest = divmod(block_tokens or own_tokens, own_tokens)
        if rest or not factor:
            raise ConfigError(f"--block-tokens must be a multiple of {own_tokens}, the blocks of {source}")
        with new_trace(target, _MAX_CONVERTED_BYTES) as written:
            try:
                for request in read_form(source, form):
                    written.add(coarsened(request, factor))
            except BaseException:
                target.unlink(missing_ok=True)
                raise
    click.echo(f"{written.num_requests} requests in {target}, with blocks of {own_tokens * factor} tokens")


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    try:
        yield
    except (KvtierError, OSError) as error:
        raise click.ClickException(printable(str(error), _LONGEST)) from error


@contextlib.contextmanager
def _stopping(seconds: float | None) -> Iterator[threading.Event]:
    """An event that is set by Ctrl-C, a request to end or the time; nothing is interrupted halfway."""
    stop = threading.Event()
    timer = None if seconds is None else threading.Timer(seconds, stop.set)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if timer is not None:
            timer.start()
        yield stop
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(count: int, stop: threading.Event) -> None:
    if count and not stop.is_set():
        click.echo(f"\r{count} requests", nl=False, err=True)
