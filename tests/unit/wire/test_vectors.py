"""The shared test vectors: what this side sends, takes and refuses is what `clients/vectors/wire.json` says."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from kvtier.errors import RemoteProtocolError
from kvtier.vineyard.chunk_names import ChunkNames, identity_of
from kvtier.wire import messages as wire
from kvtier.wire.frames import HANDSHAKE_LIMITS, HEADER_BYTES, Frame, FrameLimits, FrameReader
from scripts import wire_vectors

_VECTORS: dict[str, Any] = json.loads(wire_vectors.FILE.read_text())
_OPEN_LIMITS = FrameLimits(_VECTORS["limits"]["body_bytes"], _VECTORS["limits"]["payload_bytes"])


def _read(stream: bytes, limits: FrameLimits) -> Frame[wire.Message] | None:
    reader = FrameReader(wire.decode, lambda number, message, nbytes: [memoryview(bytearray(nbytes))], limits)
    frame = None
    while stream:
        want = reader.want()[0]
        piece = stream[: len(want)]
        want[: len(piece)] = piece
        stream = stream[len(piece) :]
        frame = reader.advance(len(piece))
    return frame


def test_the_file_is_what_the_script_makes() -> None:
    assert wire_vectors.FILE.read_text() == wire_vectors.text(), "run python scripts/wire_vectors.py"


def test_every_message_has_a_vector() -> None:
    assert {vector["message"] for vector in _VECTORS["frames"]} == {kind.__name__ for kind in get_args(wire.Message)}


@pytest.mark.parametrize("vector", _VECTORS["frames"], ids=lambda vector: f"{vector['message']} {vector['request']}")
def test_a_frame_is_read_as_the_vectors_say(vector: dict[str, Any]) -> None:
    stream = bytes.fromhex(vector["frame"]) + bytes(vector["payload_bytes"])
    frame = _read(stream, _OPEN_LIMITS)

    assert frame is not None
    assert (type(frame.message).__name__, frame.request) == (vector["message"], vector["request"])
    assert frame.payload_bytes == vector["payload_bytes"]
    for field in vector["fields"]:
        value = getattr(frame.message, field["name"])
        assert (value.hex() if field["type"] == "bytes" else value) == field["value"]


@pytest.mark.parametrize("vector", _VECTORS["other_forms"], ids=lambda vector: vector["why"])
def test_longer_forms_of_a_message_are_the_same(vector: dict[str, str]) -> None:
    assert wire.encode(wire.decode(bytes.fromhex(vector["body"]))).hex() == vector["same_as"]


@pytest.mark.parametrize("vector", _VECTORS["refused_bodies"], ids=lambda vector: vector["why"])
def test_a_wrong_body_is_refused(vector: dict[str, str]) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode(bytes.fromhex(vector["body"]))


@pytest.mark.parametrize("vector", _VECTORS["refused_headers"], ids=lambda vector: vector["why"])
def test_a_wrong_header_is_refused(vector: dict[str, Any]) -> None:
    header = bytes.fromhex(vector["header"])
    assert len(header) == HEADER_BYTES
    with pytest.raises(RemoteProtocolError):
        _read(header, _OPEN_LIMITS if vector["is_open"] else HANDSHAKE_LIMITS)


def test_chunks_lie_where_the_vectors_say() -> None:
    for vector in _VECTORS["chunks"]:
        identity = identity_of(vector["tensor_bytes"], vector["layer"], vector["chunk_tokens"])
        names = ChunkNames(identity, vector["chunk_tokens"], 8).of(vector["tokens"])
        assert [name.folder for name in names] == vector["folders"]
        assert [name.file_name for name in names] == vector["files"]
