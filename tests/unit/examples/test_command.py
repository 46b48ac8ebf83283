"""How the examples begin and end."""

from __future__ import annotations

import argparse
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.use_remote_KV_cache import make_dummy_inputs, make_model, speed_test
from examples.use_remote_KV_cache.command import base_url, run_command


def test_sigterm_leaves_what_was_entered_and_then_means_what_it_did() -> None:
    before = signal.getsignal(signal.SIGTERM)
    left: list[str] = []

    def main() -> int:
        with ExitStack() as stack:
            stack.callback(left.append, "deployment")
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        return 0

    with pytest.raises(SystemExit) as ended:
        run_command(main)

    assert ended.value.code == 143
    assert left == ["deployment"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise KeyboardInterrupt

    assert run_command(main) == 130
    assert capsys.readouterr().err == "interrupted; everything was stopped\n"


@pytest.mark.parametrize(
    "text", ["127.0.0.1:31999", "host", "https://host:1", "http://", "http://a:b", "http://a:1/v1"]
)
def test_an_address_without_a_scheme_or_with_a_path_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not http://host:port"):
        base_url(text)


def test_a_slash_at_the_end_is_nothing() -> None:
    assert base_url("http://127.0.0.1:8080/") == "http://127.0.0.1:8080"


def test_what_goes_wrong_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("words")
    (tmp_path / "bytes").write_bytes(b"\xff")
    free = "http://127.0.0.1:1"
    refused = f"{free} cannot be reached (Connection refused): is the deployment running? kvtier serve deploy.yml"
    for main, arguments, sentence in (
        (make_dummy_inputs.main, "--model /nope", "there is no model folder /nope\n"),
        (make_model.main, "--folder /proc/z", "/proc/z: "),
        (speed_test.main, "--model m --filename /nope/x", "/nope/x: No such file or directory\n"),
        (speed_test.main, f"--model m --filename {tmp_path}/bytes", "the document is not UTF-8 text\n"),
        (speed_test.main, f"--model m --filename {tmp_path}/text --url {free}", f"{refused}\n"),
    ):
        monkeypatch.setattr("sys.argv", ["program", *arguments.split()])

        assert run_command(main) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"error: {sentence}")
        assert said.count("\n") == 1
