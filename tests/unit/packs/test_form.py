"""The form of a pack: what was written is read again, and nothing else is."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.blocks.hashing import BlockHash
from kvtier.errors import ConfigError
from kvtier.packs.form import PackHeader, PackReader, PackWriter, read_sign_key

KEY = b"a key of more than sixteen bytes"
BLOCK_BYTES = 96
HASHES = [BlockHash(bytes([number]) * 32) for number in range(1, 8)]
BLOCKS = [bytes([number]) * BLOCK_BYTES for number in range(1, 8)]


def header_of(**fields: object) -> PackHeader:
    values = {
        "name": "handbook",
        "model": "tiny",
        "namespace": "ab" * 32,
        "root": "ab" * 32,
        "fields": {"weights": "w", "model_config": {"rope": 1}},
        "block_bytes": BLOCK_BYTES,
        "block_tokens": 16,
        "num_blocks": len(HASHES),
        "section_blocks": 3,
        "tokens": 120,
        **fields,
    }
    return msgspec.convert(values, PackHeader)


def pack_of(key: bytes | None = None, text: bytes = b"{}", **fields: object) -> bytes:
    header = header_of(is_signed=key is not None, text_bytes=len(text), **fields)
    file = io.BytesIO()
    writer = PackWriter(file, header, HASHES, text, key)
    for first in range(0, len(BLOCKS), 3):
        writer.write(memoryview(b"".join(BLOCKS[first : first + 3])))
    writer.finish()
    return file.getvalue()


def read(data: bytes, key: bytes | None = None) -> list[bytes]:
    """All blocks, in order."""
    reader = PackReader(io.BytesIO(data), "it", key)
    assert reader.hashes == HASHES
    return [bytes(block) for section in reader.sections() for block in section.blocks()]


PLAIN, SIGNED = pack_of(), pack_of(KEY)


def test_what_was_written_is_read_again() -> None:
    reader = PackReader(io.BytesIO(PLAIN), "it")
    assert reader.header == header_of(text_bytes=2)
    assert reader.text == b"{}"
    assert [bytes(one) for section in reader.sections() for one in section.blocks()] == BLOCKS
    assert read(SIGNED, KEY) == BLOCKS


class _Trickle(io.RawIOBase):
    """A pipe that gives a few bytes at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        self._data = data
        self._step = step

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        part = self._data[: min(self._step, len(buffer))]
        buffer[: len(part)] = part
        self._data = self._data[len(part) :]
        return len(part)


@pytest.mark.parametrize("step", [1, 7, 4096])
def test_a_pack_is_read_from_a_pipe(step: int) -> None:
    reader = PackReader(_Trickle(PLAIN, step), "it")
    assert [bytes(one) for section in reader.sections() for one in section.blocks()] == BLOCKS


@pytest.mark.parametrize(("data", "key"), [(PLAIN, None), (SIGNED, KEY)])
def test_a_pack_that_is_cut_off_anywhere_is_refused(data: bytes, key: bytes | None) -> None:
    for length in range(len(data)):
        with pytest.raises(ConfigError, match=r"^it is (cut off|not a pack)"):
            read(data[:length], key)


@pytest.mark.parametrize(("data", "key"), [(PLAIN, None), (SIGNED, KEY)])
def test_every_changed_byte_is_noticed(data: bytes, key: bytes | None) -> None:
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x40
        with pytest.raises(ConfigError, match=r"^it "):
            read(bytes(changed), key)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([(PLAIN, None), (SIGNED, KEY)]),
    st.lists(
        st.tuples(st.integers(0, len(SIGNED)), st.integers(0, 64), st.binary(max_size=48)), min_size=1, max_size=4
    ),
)
def test_a_pack_of_which_parts_were_replaced_gives_no_wrong_block(
    pack: tuple[bytes, bytes | None], edits: list[tuple[int, int, bytes]]
) -> None:
    data, key = pack
    changed = data
    for position, length, replacement in edits:
        changed = changed[:position] + replacement + changed[position + length :]
    found: list[bytes] = []
    sentence = ""
    try:
        reader = PackReader(io.BytesIO(changed), "it", key)
        for section in reader.sections():
            found += [bytes(block) for block in section.blocks()]
    except ConfigError as error:
        sentence = str(error)
    assert found == BLOCKS[: len(found)]
    assert "\n" not in sentence
    assert bool(sentence) == (changed != data)


def test_sections_of_another_pack_do_not_fit() -> None:
    other = pack_of(name="other")
    start = len(PLAIN) - len(PLAIN.partition(b"sect")[1] + PLAIN.partition(b"sect")[2])
    mixed = PLAIN[:start] + other[other.index(b"sect") :]
    with pytest.raises(ConfigError, match="cannot be trusted"):
        read(mixed)


def test_bytes_behind_the_end_are_refused() -> None:
    with pytest.raises(ConfigError, match="bytes behind its end"):
        read(PLAIN + b"x")


@pytest.mark.parametrize(
    ("data", "key", "sentence"),
    [
        (SIGNED, None, "it is signed: give the key"),
        (PLAIN, KEY, "it is not signed, but a key was given"),
        (SIGNED, KEY + b"!", "another key has signed it"),
    ],
)
def test_a_signature_is_needed_where_there_is_a_key_and_no_other_will_do(
    data: bytes, key: bytes | None, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(data, key)


def test_who_has_no_key_cannot_change_a_signed_pack() -> None:
    """As somebody would who makes every checksum right: the seals are not."""
    forged = io.BytesIO()
    header = header_of(is_signed=True, text_bytes=2)
    writer = PackWriter(forged, header, HASHES, b"{}", b"a guess of more than sixteen bytes")
    for first in range(0, len(BLOCKS), 3):
        writer.write(memoryview(bytes(BLOCK_BYTES * len(BLOCKS[first : first + 3]))))
    writer.finish()
    with pytest.raises(ConfigError, match="cannot be trusted"):
        read(forged.getvalue(), KEY)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_blocks": 0},
        {"num_blocks": 1 << 40},
        {"block_bytes": 1 << 50},
        {"block_bytes": -1},
        {"section_blocks": 1 << 30},
        {"section_blocks": 0},
        {"text_bytes": 1 << 50},
        {"namespace": "zz"},
        {"root": ""},
        {"name": "n" * 300},
        {"unknown": 1},
        {"tokens": 7 * 16 - 1},
        {"tokens": 8 * 16},
        {"tokens": (1 << 40) - 1},
    ],
)
def test_an_impossible_header_is_refused_before_memory_is_taken(fields: dict[str, object]) -> None:
    good = msgspec.json.decode(msgspec.json.encode(header_of()))
    encoded = msgspec.json.encode({**good, **fields})
    data = b"\x93kvpack\n" + (1).to_bytes(4, "little") + len(encoded).to_bytes(4, "little") + encoded
    with pytest.raises(ConfigError, match=r"^it is damaged"):
        PackReader(io.BytesIO(data), "it")


def test_a_newer_version_and_a_nested_header_are_refused() -> None:
    with pytest.raises(ConfigError, match="version 2"):
        PackReader(io.BytesIO(PLAIN[:8] + (2).to_bytes(4, "little") + PLAIN[12:]), "it")
    nested = b'{"fields":' + b'{"a":' * 100_000
    data = b"\x93kvpack\n" + (1).to_bytes(4, "little") + len(nested).to_bytes(4, "little") + nested
    with pytest.raises(ConfigError, match="is damaged"):
        PackReader(io.BytesIO(data), "it")


def test_a_short_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="16 to 4096 bytes, not 5"):
        read_sign_key(tmp_path / "key")
    (tmp_path / "key").write_bytes(KEY + b"\n")
    assert read_sign_key(tmp_path / "key") == KEY
