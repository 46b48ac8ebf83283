"""The test vectors of docs/protocol.md: frames, hashes, checksums and proofs that every client has to agree on.

python scripts/wire_vectors.py            write clients/vectors/wire.json
python scripts/wire_vectors.py --check    fail if the file is not what this script makes

Runs of bytes are written in hexadecimal digits. A payload of n bytes is a pattern: byte i is 7 * i + i // 256,
modulo 256.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import mmh3
import msgspec
import xxhash

from kvtier.blocks.hashing import BlockHash, block_hashes, salted_root
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace, NamespaceFields
from kvtier.memory.checksum import checksum_of
from kvtier.vineyard.chunk_names import identity_of
from kvtier.wire import messages as wire
from kvtier.wire.frames import HANDSHAKE_LIMITS, MAGIC, MAX_BODY_BYTES, VERSION, encode_frame

FILE = Path(__file__).parents[1] / "clients" / "vectors" / "wire.json"

_NAMESPACE = Namespace(bytes(range(32)))
_OTHER = Namespace(bytes(range(100, 132)))
_HASHES = block_hashes(_NAMESPACE, range(1, 49), 16)
_RUN = b"".join(_HASHES)
_HOLDER = bytes(range(16))
_NONCE = bytes(range(16, 32))
_BIG = (1 << 63) + 7
_XXH3_SIZES = (0, 1, 3, 4, 8, 9, 16, 17, 64, 128, 129, 200, 240, 241, 255, 256, 1023, 1024, 1025, 4096, 65_537)


def pattern(nbytes: int) -> bytes:
    return bytes((7 * i + i // 256) % 256 for i in range(nbytes))


def _messages() -> list[wire.Message]:
    """Each kind at least once, in the order of their tags, with short and long forms of every type."""
    return [
        wire.Hello("kvtier", _HOLDER, _NONCE),
        wire.Challenge(_NONCE),
        wire.Proof(pattern(32)),
        wire.Welcome("kvtier", _HOLDER, b"", 1 << 36, 1 << 28, False),
        wire.Welcome("kvtier, encrypted", _HOLDER, pattern(32), 0, 1, True),
        wire.Open(_NAMESPACE, "qwen", 10_240, 16, ""),
        wire.Open(_OTHER, "模型 é 🙂", 1 << 40, 1 << 20, '{"layers":2}' * 400),
        wire.MatchRequest(1, _RUN, 7, False),
        wire.MatchRequest(_BIG, _HASHES[0] * 2049, (1 << 64) - 1, True),
        wire.ReserveRequest(1, _RUN, 8),
        wire.GetRequest(1, _RUN, 127),
        wire.ContainsRequest(1, b""),
        wire.PinRequest(1, _RUN, True),
        wire.DropRequest(128, _RUN[:32]),
        wire.Release(255),
        wire.Fill(256, 0, 65_535),
        wire.Commit(65_536, 3, 0),
        wire.Close((1 << 32) - 1),
        wire.Flush(),
        wire.InfoRequest(),
        wire.StatsRequest(),
        wire.Ping(),
        wire.Bye(),
        wire.Await(1 << 32, 512),
        wire.ListRequest(1, (1 << 48) - 1),
        wire.VerifyRequest(1, _RUN),
        wire.PresenceRequest(_OTHER, _RUN),
        wire.NoteRequest("request-1", '{"cached_tokens":16}'),
        wire.NotedRequest("é" * 256),
        wire.SpacesRequest(0),
        wire.SuspectRequest(1, _RUN[:64]),
        wire.PlaceRequest(1, _HASHES[2], _HASHES[0], 2),
        wire.PlaceRequest(1, _HASHES[2], _HASHES[0], wire.MAX_POSITION),
        wire.MissCurveRequest(0),
        wire.MissCurveRequest((1 << 48) - 1),
        wire.Opened(3),
        wire.Opened(-1),
        wire.Matched(wire.pack_numbers([0, 12_288, 1 << 40]), "all", 2, 0),
        *[wire.Matched(b"", word, 0, 5) for word in wire.ENDING_WORDS.values()],
        wire.Reserved(wire.pack_numbers([0, 2]), wire.pack_numbers([4096, 16_384]), 1, 0, 4, "all is leased"),
        wire.Blocks(0, 2, True, wire.pack_numbers([1, (1 << 64) - 1])),
        wire.Blocks(512, 0, True, b""),
        wire.Contained(b"\1\0\1"),
        wire.Counted(0),
        wire.Counted((1 << 64) - 1),
        wire.Done(),
        wire.Document('{"server":"kvtier"}'),
        wire.Failure("full", "no room"),
        wire.Listed(_RUN[:64], b"\1\5", 2),
        wire.SharedMatch(wire.pack_numbers([4096]), "miss", 1, 5, 3),
        wire.RetainRequest(1, _RUN, 3600, 50, "key alice", 1 << 30),
        wire.RetainRequest(1, b"", 0, 100, "", 0),
        wire.Retained(3, 604_800, "retained 3 of 8 blocks"),
    ]


def _frame(request: int, message: wire.Message, payload_bytes: int) -> dict[str, object]:
    return {
        "message": type(message).__name__,
        "request": request,
        "payload_bytes": payload_bytes,
        "fields": [_field(name, getattr(message, name)) for name in message.__struct_fields__],
        "frame": encode_frame(request, wire.encode(message), payload_bytes).hex(),
    }


def _field(name: str, value: object) -> dict[str, object]:
    if isinstance(value, bytes):
        return {"name": name, "type": "bytes", "value": value.hex()}
    kind = {bool: "bool", int: "int", str: "text"}[type(value)]
    return {"name": name, "type": kind, "value": value}


def _other_forms() -> Iterator[tuple[str, bytes, bytes]]:
    """Valid encodings of a message that our own senders do not use."""
    done, counted, contained = wire.Done(), wire.Counted(5), wire.Contained(b"\1\1")
    yield "an array with 16 bits of length", bytes([0xDC, 0, 1, 46]), wire.encode(done)
    yield "an array with 32 bits of length", bytes([0xDD, 0, 0, 0, 1, 46]), wire.encode(done)
    yield "a tag of 16 bits", bytes([0x91, 0xCD, 0, 46]), wire.encode(done)
    yield "a signed tag", bytes([0x91, 0xD0, 46]), wire.encode(done)
    yield "a number of 64 bits", bytes([0x92, 45, 0xCF]) + (5).to_bytes(8, "big"), wire.encode(counted)
    yield "a signed number of 32 bits", bytes([0x92, 45, 0xD2]) + (5).to_bytes(4, "big"), wire.encode(counted)
    yield "bytes with 32 bits of length", bytes([0x92, 44, 0xC6, 0, 0, 0, 2, 1, 1]), wire.encode(contained)


def _refused_bodies() -> Iterator[tuple[str, bytes]]:
    pack = msgspec.msgpack.encode
    yield "an unknown tag", pack([99])
    yield "a tag that is a text", pack(["46"])
    yield "no array", pack(46)
    yield "an empty array", pack([])
    yield "a field too few", pack([45])
    yield "a field too many", pack([46, 0])
    yield "bytes behind the message", pack([46]) + b"\0"
    yield "a message cut short", wire.encode(wire.Contained(b"\1\0\1"))[:-1]
    yield "a length beyond the message", bytes([0x92, 44, 0xC6, 255, 255, 255, 255, 1])
    yield "an array longer than the message", bytes([0xDD, 255, 255, 255, 255, 46])
    yield "a text for bytes", pack([44, "abc"])
    yield "bytes for a text", pack([47, b"abc"])
    yield "a float for a number", pack([45, 3.0])
    yield "a bool for a number", pack([45, True])
    yield "a number for a bool", pack([11, 1, b"", 1, 1])
    yield "nil for a number", pack([45, None])
    yield "a map for a text", pack([47, {}])
    yield "an extension for bytes", bytes([0x92, 44, 0xC7, 1, 5, 0])
    yield "the byte that msgpack never uses", bytes([0x92, 45, 0xC1])
    yield "a text that is not UTF-8", bytes([0x92, 47, 0xA2, 0xC3, 0x28])
    yield "a text with half a surrogate pair", bytes([0x92, 47, 0xA3, 0xED, 0xA0, 0x80])
    yield "a text in overlong UTF-8", bytes([0x92, 47, 0xA2, 0xC0, 0x80])
    yield "a negative count", pack([45, -1])
    yield "a holder of 15 bytes", pack([1, "x", bytes(15), bytes(16)])
    yield "a nonce of 17 bytes", pack([2, bytes(17)])
    yield "an arena of negative size", pack([4, "kvtier", b"", b"", -1, 1, False])
    yield "no room for a payload", pack([4, "kvtier", b"", b"", 0, 0, False])
    yield "a namespace of 31 bytes", pack([10, bytes(31), "", 1, 1, ""])
    yield "a block of no bytes", pack([10, bytes(32), "", 0, 1, ""])
    yield "a block over a tebibyte", pack([10, bytes(32), "", (1 << 40) + 1, 1, ""])
    yield "a block of no tokens", pack([10, bytes(32), "", 1, 0, ""])
    yield "a block of too many tokens", pack([10, bytes(32), "", 1, (1 << 20) + 1, ""])
    yield "a name of 257 characters", pack([10, bytes(32), "é" * 257, 1, 1, ""])
    yield "half a hash", pack([11, 1, bytes(48), 1, False])
    yield "no blocks to a frame", pack([13, 1, bytes(32), 0])
    yield "a negative place to fill from", pack([18, 1, -1, 1])
    yield "a fill of nothing", pack([18, 1, 0, 0])
    yield "a commit of less than nothing", pack([19, 1, 0, -1])
    yield "a wait for less than nothing", pack([26, 1, -1])
    yield "a place in a listing that is too far", pack([27, 1, 1 << 48])
    yield "a place among namespaces before the first", pack([32, -1])
    yield "an empty request id", pack([31, ""])
    yield "a request id of 257 characters", pack([30, "x" * 257, ""])
    yield "half an offset", pack([41, bytes(12), "all", 0, 0])
    yield "an unknown ending", pack([41, b"", "over", 0, 0])
    yield "more ready than matched", pack([41, bytes(8), "all", 2, 0])
    yield "less stored than nothing", pack([41, b"", "all", 0, -1])
    yield "a slot without a position", pack([42, b"", bytes(8), 0, 0, 0, ""])
    yield "less refused than nothing", pack([42, b"", b"", 0, 0, -1, ""])
    yield "a block without a checksum", pack([43, 0, 1, True, b""])
    yield "blocks before the first", pack([43, -1, 0, True, b""])
    yield "a hash without flags", pack([49, bytes(32), b"", 0])


def _refused_headers() -> Iterator[tuple[str, bytes, bool]]:
    """Headers, and whether the handshake is over."""
    head = encode_frame(0, b"x")[:24]
    yield "another magic", b"HTTP" + head[4:], True
    yield "another version", head[:4] + (VERSION + 1).to_bytes(2, "little") + head[6:], True
    yield "zeros that are none", head[:6] + b"\1\0" + head[8:], True
    yield "no body", encode_frame(0, b""), True
    yield "a body over the limit", head[:12] + (MAX_BODY_BYTES + 1).to_bytes(4, "little") + head[16:], True
    yield "a body over the limit of a handshake", head[:12] + (4097).to_bytes(4, "little") + head[16:], False
    yield "a payload in a handshake", head[:16] + (1).to_bytes(8, "little"), False
    yield "a payload over the limit", head[:16] + ((1 << 28) + 1).to_bytes(8, "little"), True
    yield "a payload of all bits", head[:16] + b"\xff" * 8, True


def _block_hashes() -> Iterator[dict[str, object]]:
    cases: list[tuple[Namespace, list[int], int, BlockHash | None]] = [
        (_NAMESPACE, list(range(1, 49)), 16, None),
        (_NAMESPACE, [0, 1, (1 << 32) - 1, 65_536, 7], 1, None),
        (_OTHER, list(range(1000, 1100)), 32, None),
        (_NAMESPACE, list(range(49, 81)), 16, _HASHES[2]),
        (_OTHER, list(range(200)), 200, None),
    ]
    for namespace, tokens, block_tokens, parent in cases:
        yield {
            "namespace": namespace.hex(),
            "tokens": tokens,
            "block_tokens": block_tokens,
            "parent": None if parent is None else parent.hex(),
            "hashes": [each.hex() for each in block_hashes(namespace, tokens, block_tokens, parent=parent)],
        }


def _namespaces() -> Iterator[dict[str, object]]:
    small = KvLayout(layers=2, kv_heads=1, head_dim=80, dtype="float16", block_tokens=16)
    large = KvLayout(layers=36, kv_heads=8, head_dim=128)
    for fields in (
        NamespaceFields(layout=small, weights="tiny"),
        NamespaceFields(
            layout=large,
            weights='sha256 "é" \\ 🙂 \x1f\n',
            model_config={"rope": {"theta": 1e6, "scaling": None}, "hidden": 4096},
            quantization="fp8",
            compute_dtype="float16",
            first_layer=12,
            lora="adapter",
            salt="tenant/1",
        ),
    ):
        layout = fields.layout
        yield {
            "layers": layout.layers,
            "kv_heads": layout.kv_heads,
            "head_dim": layout.head_dim,
            "dtype": layout.dtype,
            "block_tokens": layout.block_tokens,
            "weights": fields.weights,
            "model_config": json.dumps(fields.model_config, sort_keys=True, separators=(",", ":")),
            "quantization": fields.quantization,
            "compute_dtype": fields.compute_dtype,
            "first_layer": fields.first_layer,
            "lora": fields.lora,
            "salt": fields.salt,
            "digest": fields.digest().hex(),
        }


def _macs() -> Iterator[dict[str, str]]:
    for token in (b"a token", b"", pattern(64), pattern(65), pattern(200)):
        yield {
            "token": token.hex(),
            "client_nonce": _HOLDER.hex(),
            "server_nonce": _NONCE.hex(),
            "client": hmac.digest(token, b"client" + _HOLDER + _NONCE, hashlib.sha256).hex(),
            "server": hmac.digest(token, b"server" + _HOLDER + _NONCE, hashlib.sha256).hex(),
        }


def _chunks() -> Iterator[dict[str, object]]:
    """Names of chunk files, for clients that have them."""
    for tensor_bytes, layer, chunk_tokens, num_tokens in ((80, 3, 4, 13), (16, 2, 2, 4), (1 << 20, 40, 16, 64)):
        tokens = list(range(1, num_tokens + 1))
        identity = identity_of(tensor_bytes, layer, chunk_tokens)
        data = b"".join(token.to_bytes(4, "little") for token in tokens)
        hashes = block_hashes(identity, tokens, chunk_tokens)
        yield {
            "tensor_bytes": tensor_bytes,
            "layer": layer,
            "chunk_tokens": chunk_tokens,
            "tokens": tokens,
            "identity": identity.hex(),
            "folders": [
                f"{mmh3.hash(data[: 4 * chunk_tokens * (depth + 1)], signed=False):08x}" for depth in range(len(hashes))
            ],
            "files": [f"{digest.hex()}-{depth}" for depth, digest in enumerate(hashes)],
        }


def vectors() -> dict[str, object]:
    frames = [_frame(number, message, 0) for number, message in enumerate(_messages())]
    frames.append(_frame((1 << 32) - 1, wire.Fill(1, 0, 2), 20_480))
    return {
        "about": "Made by scripts/wire_vectors.py; docs/protocol.md says what they mean.",
        "magic": MAGIC,
        "version": VERSION,
        "limits": {
            "handshake_body_bytes": HANDSHAKE_LIMITS.body_bytes,
            "body_bytes": MAX_BODY_BYTES,
            "payload_bytes": 1 << 28,
        },
        "frames": frames,
        "other_forms": [{"why": why, "body": body.hex(), "same_as": same.hex()} for why, body, same in _other_forms()],
        "refused_bodies": [{"why": why, "body": body.hex()} for why, body in _refused_bodies()],
        "refused_headers": [
            {"why": why, "header": header.hex(), "is_open": is_open} for why, header, is_open in _refused_headers()
        ],
        "block_hashes": list(_block_hashes()),
        "salted_roots": [
            {"namespace": _NAMESPACE.hex(), "salt": salt, "root": salted_root(_NAMESPACE, salt).hex()}
            for salt in ("", "tenant", "é🙂")
        ],
        "namespaces": list(_namespaces()),
        "macs": list(_macs()),
        "xxh3": [
            {"seed": seed, "nbytes": nbytes, "digest": f"{xxhash.xxh3_64_intdigest(pattern(nbytes), seed):016x}"}
            for seed in (0, 1, 0x9E3779B97F4A7C15)
            for nbytes in _XXH3_SIZES
        ],
        "checksums": [
            {
                "namespace": _NAMESPACE.hex(),
                "hash": _HASHES[0].hex(),
                "nbytes": nbytes,
                "checksum": f"{checksum_of(_NAMESPACE, _HASHES[0], memoryview(pattern(nbytes))):016x}",
            }
            for nbytes in (1, 100, 176, 177, 4096, 10_240, 70_001)
        ],
        "chunks": list(_chunks()),
    }


def text() -> str:
    return json.dumps(vectors(), indent=1, ensure_ascii=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the file is not what this script makes")
    arguments = parser.parse_args()
    if not arguments.check:
        FILE.write_text(text())
        return 0
    if FILE.read_text() == text():
        return 0
    print(f"{FILE} is not what this script makes: run python scripts/wire_vectors.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
