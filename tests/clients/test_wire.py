"""The C side of the wire: every shared vector, and mutated frames, under sanitizers."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import RemoteProtocolError
from kvtier.wire import messages as wire
from kvtier.wire.frames import HEADER_BYTES, FrameLimits, FrameReader
from scripts import wire_vectors
from tests.support.actors import mutants
from tests.support.c_programs import CProgram, c_program

_VECTORS: dict[str, Any] = json.loads(wire_vectors.FILE.read_text())
_LIMITS = FrameLimits(_VECTORS["limits"]["body_bytes"], _VECTORS["limits"]["payload_bytes"])


@pytest.fixture
def lines(sanitized_programs: Path) -> Iterator[CProgram]:
    with c_program(sanitized_programs / "wire_lines") as program:
        yield program


def _hex(text: str) -> str:
    return text.encode().hex() or "-"


def _shown(field: dict[str, Any]) -> str:
    match field["type"]:
        case "text":
            return f"text:{field['value'].encode().hex()}"
        case "bool":
            return f"bool:{int(field['value'])}"
    return f"{field['type']}:{field['value']}"


def test_frames_are_read_and_made_as_the_vectors_say(lines: CProgram) -> None:
    for vector in _VECTORS["frames"]:
        fields = [_shown(field) for field in vector["fields"]]
        expected = ["same", str(vector["request"]), str(vector["payload_bytes"]), vector["message"], *fields]
        assert lines.ask(f"frame {vector['frame']}") == " ".join(expected)


def test_longer_forms_are_read_and_wrong_ones_refused(lines: CProgram) -> None:
    for vector in _VECTORS["other_forms"]:
        assert lines.ask(f"body {vector['body']}") == vector["same_as"], vector["why"]
    for vector in _VECTORS["refused_bodies"]:
        assert lines.ask(f"body {vector['body']}").startswith("error a message that cannot be read"), vector["why"]
    for vector in _VECTORS["refused_headers"]:
        assert lines.ask(f"header {vector['header']} {int(vector['is_open'])}").startswith("error"), vector["why"]


def test_hashes_and_namespaces_are_pythons(lines: CProgram) -> None:
    for vector in _VECTORS["block_hashes"]:
        tokens = struct.pack(f"<{len(vector['tokens'])}I", *vector["tokens"]).hex()
        asked = f"hashes {vector['namespace']} {vector['parent'] or '-'} {vector['block_tokens']} {tokens}"
        assert lines.ask(asked) == "".join(vector["hashes"])
    for vector in _VECTORS["salted_roots"]:
        assert lines.ask(f"salted {vector['namespace']} {_hex(vector['salt'])}") == vector["root"]
    for vector in _VECTORS["namespaces"]:
        numbers = [vector[name] for name in ("layers", "kv_heads", "head_dim", "block_tokens", "first_layer")]
        texts = ("dtype", "weights", "model_config", "quantization", "compute_dtype", "lora", "salt")
        asked = ["namespace", *map(str, numbers), *(_hex(vector[name]) for name in texts)]
        assert lines.ask(" ".join(asked)) == vector["digest"]


def test_checksums_are_the_same_on_any_processor(plain_programs: Path) -> None:
    with c_program(plain_programs / "wire_lines") as lines:
        _check_checksums(lines)


def test_proofs_and_checksums_are_pythons(lines: CProgram) -> None:
    for vector in _VECTORS["macs"]:
        for role in ("client", "server"):
            text = role.encode().hex() + vector["client_nonce"] + vector["server_nonce"]
            assert lines.ask(f"mac {vector['token'] or '-'} {text}") == vector[role]
    _check_checksums(lines)


def _check_checksums(lines: CProgram) -> None:
    for vector in _VECTORS["xxh3"]:
        for piece_bytes in (1, 63, 64, 100, 256, 257, 1 << 20):
            asked = f"xxh3 {vector['seed']} {vector['nbytes']} {piece_bytes}"
            assert lines.ask(asked) == vector["digest"], asked
    for vector in _VECTORS["checksums"]:
        asked = f"checksum {vector['namespace']} {vector['hash']} {vector['nbytes']}"
        assert lines.ask(asked) == vector["checksum"]


@pytest.mark.parametrize("num_frames", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_frames_are_judged_as_python_judges_them(lines: CProgram, tmp_path: Path, num_frames: int) -> None:
    frames = list(mutants(random.Random(num_frames), num_frames))
    file = tmp_path / "mutants"
    file.write_bytes(b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames))

    verdicts = lines.ask(f"mutants {file}")

    assert len(verdicts) == num_frames
    assert verdicts.count("o") > num_frames // 4, "many mutants are messages still"
    assert verdicts.count("b") > num_frames // 50
    for frame, verdict in zip(frames, verdicts, strict=True):
        assert _verdict_on(frame) == verdict, frame.hex()


def _verdict_on(frame: bytes) -> str:
    """Python's verdict on a frame: h header refused, s too short, b body refused, o accepted."""
    reader = FrameReader(wire.decode, lambda number, message, nbytes: [memoryview(bytearray(nbytes))], _LIMITS)
    if len(frame) < HEADER_BYTES:
        return "s"
    reader.want()[0][:] = frame[:HEADER_BYTES]
    try:
        reader.advance(HEADER_BYTES)
    except RemoteProtocolError:
        return "h"
    body_bytes = len(reader.want()[0])
    if len(frame) - HEADER_BYTES < body_bytes:
        return "s"
    try:
        wire.decode(frame[HEADER_BYTES : HEADER_BYTES + body_bytes])
    except RemoteProtocolError:
        return "b"
    return "o"
