"""The messages: one small struct each, msgpack arrays on the wire, decoded strictly.

Hashes travel as one run of 32-byte digests, offsets as one run of u64: a match over 100,000 tokens is one string, not
6,250 objects. A request's reply carries the same request number; `Failure` may answer any request.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from kvtier.blocks.hashing import HASH_BYTES
from kvtier.blocks.match_end import MatchEnd, most_telling
from kvtier.blocks.namespace import NAMESPACE_BYTES
from kvtier.blocks.retention import MAX_ACCOUNT_CHARS, MAX_PRIORITY, MAX_TTL_S, MIN_PRIORITY
from kvtier.errors import RemoteProtocolError

NONCE_BYTES = 16
HOLDER_BYTES = 16
MAX_FIELDS_CHARS = 64 << 10
MAX_REQUEST_ID_CHARS = 256
MAX_NOTE_CHARS = 64 << 10
MAX_POSITION = (1 << 32) - 1


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


def _require(is_right: bool, sentence: str) -> None:
    if not is_right:
        raise ValueError(sentence)


def _check_request_id(request_id: str) -> None:
    _require(
        0 < len(request_id) <= MAX_REQUEST_ID_CHARS, f"a request id has from 1 to {MAX_REQUEST_ID_CHARS} characters"
    )


# --- handshake -----------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag=1):
    """The client's first message. `holder` is the same on all connections of one client."""

    client: str
    holder: bytes
    nonce: bytes

    def __post_init__(self) -> None:
        _require(len(self.holder) == HOLDER_BYTES and len(self.nonce) == NONCE_BYTES, "holder and nonce: 16 bytes")


class Challenge(_Message, frozen=True, tag=2):
    """The server requires proof of the token."""

    nonce: bytes

    def __post_init__(self) -> None:
        _require(len(self.nonce) == NONCE_BYTES, "nonce: 16 bytes")


class Proof(_Message, frozen=True, tag=3):
    mac: bytes


class Welcome(_Message, frozen=True, tag=4):
    """The client is accepted. `mac` proves that the server knows the token, too; `arena_bytes` is 0 without an arena.

    The arena's descriptor is sent with this message.
    """

    server: str
    server_id: bytes
    mac: bytes
    arena_bytes: int
    max_payload_bytes: int
    has_disk: bool

    def __post_init__(self) -> None:
        _require(self.arena_bytes >= 0 and self.max_payload_bytes > 0, "sizes must not be negative")


# --- requests ------------------------------------------------------------------------------------------------------


class Open(_Message, frozen=True, tag=10):
    """Use a namespace on this connection; `name` is for people. Answered by `Opened`.

    `fields` is what the namespace covers, as JSON, to find out why two namespaces differ; empty if unknown.
    """

    namespace: bytes
    name: str
    block_bytes: int
    block_tokens: int
    fields: str

    def __post_init__(self) -> None:
        _require(len(self.namespace) == NAMESPACE_BYTES, "a namespace has 32 bytes")
        _require(0 < self.block_tokens <= 1 << 20, "block_tokens must be positive")
        _require(0 < self.block_bytes <= 1 << 40, "block_bytes must be positive")
        _require(len(self.name) <= 256, "a name has at most 256 characters")
        _require(len(self.fields) <= MAX_FIELDS_CHARS, f"fields have at most {MAX_FIELDS_CHARS} characters")


class _Hashes(_Message, frozen=True):
    space: int
    hashes: bytes

    def __post_init__(self) -> None:
        _require(len(self.hashes) % HASH_BYTES == 0, "hashes must be a run of 32-byte digests")


class MatchRequest(_Hashes, frozen=True, tag=11):
    """Lease the longest cached prefix. Answered by `Matched`.

    The client numbers its leases and reservations itself, so that it can end one whose reply never reached it. A lazy
    match starts no read from disk: it counts what could be read, and leases the blocks in memory before that.
    """

    lease: int
    is_lazy: bool


class ReserveRequest(_Hashes, frozen=True, tag=12):
    """Take slots for the absent blocks of these. Answered by `Reserved`."""

    reservation: int


class GetRequest(_Hashes, frozen=True, tag=13):
    """Send the longest cached prefix as payload, `frame_blocks` to a frame. Answered by `Blocks`, until the last."""

    frame_blocks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.frame_blocks > 0, "frame_blocks must be positive")


class ContainsRequest(_Hashes, frozen=True, tag=14):
    """Answered by `Contained`."""


class PinRequest(_Hashes, frozen=True, tag=15):
    """Pin the cached blocks of these, or unpin them. Answered by `Counted`."""

    keep: bool


class DropRequest(_Hashes, frozen=True, tag=16):
    """Drop these, or all of the namespace if there are none. Answered by `Counted`."""


class SuspectRequest(_Hashes, frozen=True, tag=33):
    """These blocks arrived with wrong checksums. Answered by `Counted`: the altered ones, which are now dropped."""


class PlaceRequest(_Message, frozen=True, tag=34):
    """A block's place: its number in its prompt, and the first block of its segment. Answered by `Done`.

    Only for a server that has announced the blocks per segment (`session`).
    """

    space: int
    block: bytes
    head: bytes
    position: int

    def __post_init__(self) -> None:
        _require(len(self.block) == len(self.head) == HASH_BYTES, "a hash has 32 bytes")
        _require(0 <= self.position <= MAX_POSITION, "a place in a prompt")


class RetainRequest(_Hashes, frozen=True, tag=35):
    """Keep the leading ones of these, cached or not, for `ttl_s` seconds; 0 ends that. Answered by `Retained`.

    They count towards `account`, a name for one of the client's own callers, which may have `account_bytes` retained;
    0 means no limit but the client's own. Only for a server that has announced support (`session`).
    """

    ttl_s: int
    priority: int
    account: str
    account_bytes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.ttl_s <= MAX_TTL_S, f"ttl_s is from 0 to {MAX_TTL_S}")
        _require(MIN_PRIORITY <= self.priority <= MAX_PRIORITY, f"priority is from {MIN_PRIORITY} to {MAX_PRIORITY}")
        _require(len(self.account) <= MAX_ACCOUNT_CHARS, f"an account has at most {MAX_ACCOUNT_CHARS} characters")
        _require(0 <= self.account_bytes < 1 << 63, "account_bytes must not be negative")


class ListRequest(_Message, frozen=True, tag=27):
    """List the cached blocks of a namespace, from a place in the server's order on. Answered by `Listed`."""

    space: int
    first: int

    def __post_init__(self) -> None:
        _require(0 <= self.first < 1 << 48, "a place in a listing")


class VerifyRequest(_Hashes, frozen=True, tag=28):
    """Read these from disk and compare their checksums. Answered by `Contained`: 1 for an intact block."""


class PresenceRequest(_Message, frozen=True, tag=29):
    """Where these blocks of a namespace are, opened or not, without using them. Answered by `Contained`: LISTED_ flags.

    It changes nothing: no lease, no order of eviction, no load from disk.
    """

    namespace: bytes
    hashes: bytes

    def __post_init__(self) -> None:
        _require(len(self.namespace) == NAMESPACE_BYTES, "a namespace has 32 bytes")
        _require(len(self.hashes) % HASH_BYTES == 0, "hashes must be a run of 32-byte digests")


class NoteRequest(_Message, frozen=True, tag=30):
    """Keep a note on a request, as JSON, among the last of many. Answered by `Done`."""

    request_id: str
    text: str

    def __post_init__(self) -> None:
        _check_request_id(self.request_id)
        _require(len(self.text) <= MAX_NOTE_CHARS, f"a note has at most {MAX_NOTE_CHARS} characters")


class NotedRequest(_Message, frozen=True, tag=31):
    """Read a note back. Answered by `Document`, empty if there is none."""

    request_id: str

    def __post_init__(self) -> None:
        _check_request_id(self.request_id)


class Release(_Message, frozen=True, tag=17):
    """End a lease. Answered by `Done`, even if it is unknown; then a lease of that number is never granted."""

    lease: int


class Fill(_Message, frozen=True, tag=18):
    """Payload for slots `first..first+count` of a reservation, committed on arrival. Answered by `Counted`."""

    reservation: int
    first: int
    count: int

    def __post_init__(self) -> None:
        _require(self.first >= 0 and self.count > 0, "first and count must name a range")


class Commit(_Message, frozen=True, tag=19):
    """The client has written slots `first..first+count` itself. Answered by `Counted`."""

    reservation: int
    first: int
    count: int

    def __post_init__(self) -> None:
        _require(self.first >= 0 and self.count >= 0, "first and count must name a range")


class Close(_Message, frozen=True, tag=20):
    """End a reservation; uncommitted slots are given back. Answered by `Done`, even if it is unknown."""

    reservation: int


class Await(_Message, frozen=True, tag=26):
    """Wait until the first `count` blocks of a lease are in memory. Answered by `Counted`: the leading ones."""

    lease: int
    count: int

    def __post_init__(self) -> None:
        _require(self.count >= 0, "count must not be negative")


class Flush(_Message, frozen=True, tag=21):
    """Answered by `Done` once everything committed before is as durable as the server makes it."""


class InfoRequest(_Message, frozen=True, tag=22):
    """Answered by `Document`: the server, its limits, its namespaces."""


class SpacesRequest(_Message, frozen=True, tag=32):
    """Answered by `Document`: namespaces as in the server's description, from a place in its order on."""

    first: int

    def __post_init__(self) -> None:
        _require(0 <= self.first < 1 << 48, "a place in a listing")


class StatsRequest(_Message, frozen=True, tag=23):
    """Answered by `Document`: the server's contents and counters."""


class MissCurveRequest(_Message, frozen=True, tag=37):
    """Answered by `Document`: what share of prompts a cache of any size would have hit.

    If `prompts_from` is not 0, the document has the prompts that clients asked for, from that number on.
    """

    prompts_from: int

    def __post_init__(self) -> None:
        _require(0 <= self.prompts_from < 1 << 48, "a place in a listing")


class Ping(_Message, frozen=True, tag=24):
    """Answered by `Done`."""


class Bye(_Message, frozen=True, tag=25):
    """The client no longer uses anything it held. Answered by `Done`."""


# --- replies -------------------------------------------------------------------------------------------------------


class Opened(_Message, frozen=True, tag=40):
    space: int


class Matched(_Message, frozen=True, tag=41):
    """`offsets` are the arena offsets of the matched blocks (one u64 each). `ended` says why the match ended there.

    If nothing matched, there is no lease. The first `num_ready` blocks hold their bytes; `Await` the others. After a
    lazy match, `num_stored` more blocks are on disk or in memory, unleased, and `ended` applies behind them.
    """

    offsets: bytes
    ended: str
    num_ready: int
    num_stored: int

    def __post_init__(self) -> None:
        _require(len(self.offsets) % 8 == 0, "offsets must be a run of u64")
        _require(self.ended in _MATCH_ENDS, "an unknown ending")
        _require(0 <= self.num_ready <= len(self.offsets) // 8, "num_ready must be a part of the match")
        _require(self.num_stored >= 0, "num_stored must not be negative")

    @property
    def match_end(self) -> MatchEnd:
        return _MATCH_ENDS[self.ended]


class SharedMatch(Matched, frozen=True, tag=50):
    """Like `Matched`, for clients that report blocks' places: `num_shared` of `num_stored` are in a cluster."""

    num_shared: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.num_shared <= self.num_stored, "num_shared must be a part of num_stored")


ENDING_WORDS = {
    MatchEnd.ALL: "all",
    MatchEnd.NEVER_STORED: "miss",
    MatchEnd.EVICTED: "evicted",
    MatchEnd.PENDING: "pending",
    MatchEnd.LIMIT: "limit",
    MatchEnd.TIER_DOWN: "down",  # the server's disk
}
_MATCH_ENDS = {word: end for end, word in ENDING_WORDS.items()}


class Reserved(_Message, frozen=True, tag=42):
    """Slot `i` is at `offsets[i]` and is for the hash at `positions[i]`. There is no reservation without slots.

    `num_refused` found no room, for the `reason` given.
    """

    positions: bytes
    offsets: bytes
    num_ready: int
    num_pending: int
    num_refused: int
    reason: str

    def __post_init__(self) -> None:
        _require(len(self.offsets) % 8 == 0 and len(self.positions) == len(self.offsets), "runs of u64")
        _require(min(self.num_ready, self.num_pending, self.num_refused) >= 0, "counts must not be negative")


class Blocks(_Message, frozen=True, tag=43):
    """Blocks `first..first+count` of a get; their bytes are the payload, `checksums` one u64 each."""

    first: int
    count: int
    is_last: bool
    checksums: bytes

    def __post_init__(self) -> None:
        _require(self.first >= 0 and self.count >= 0, "first and count must name a range")
        _require(len(self.checksums) == 8 * self.count, "one checksum a block")


class Contained(_Message, frozen=True, tag=44):
    """One byte per hash: 1 if it is cached, or its LISTED_ flags."""

    flags: bytes


class Listed(_Message, frozen=True, tag=49):
    """One byte of flags per hash: LISTED_MEMORY, LISTED_DISK, LISTED_PINNED.

    More follow from `next_first` on; none do if it is 0.
    """

    hashes: bytes
    flags: bytes
    next_first: int

    def __post_init__(self) -> None:
        _require(len(self.hashes) == HASH_BYTES * len(self.flags), "one byte of flags per hash")


LISTED_MEMORY = 1
LISTED_DISK = 2
LISTED_PINNED = 4
LISTED_PENDING = 8
"""It is being written."""
LISTED_EVICTED = 16
"""It is in neither place, but was not long ago."""
LISTED_DOWN = 32
"""It was not found, and a place where it may be does not answer."""
LISTED_CLUSTER = 64
"""It is not here, but in the cluster below the server."""
LISTED_CACHED = LISTED_MEMORY | LISTED_DISK
_ENDS_BY_FLAG = {
    LISTED_PENDING: MatchEnd.PENDING,
    LISTED_EVICTED: MatchEnd.EVICTED,
    LISTED_DOWN: MatchEnd.TIER_DOWN,
}


class Counted(_Message, frozen=True, tag=45):
    count: int

    def __post_init__(self) -> None:
        _require(self.count >= 0, "a count must not be negative")


class Retained(_Message, frozen=True, tag=51):
    """The leading `count` blocks are retained for `ttl_s` seconds. If that is less than requested, `reason` says why.

    If a retention was to end, `count` is how many blocks were released.
    """

    count: int
    ttl_s: int
    reason: str

    def __post_init__(self) -> None:
        _require(self.count >= 0 and 0 <= self.ttl_s <= MAX_TTL_S, "what is retained must be within its bounds")


class Done(_Message, frozen=True, tag=46):
    pass


class Document(_Message, frozen=True, tag=47):
    """JSON, for users and tools; empty if there is none."""

    text: str


class Failure(_Message, frozen=True, tag=48):
    """The request was not carried out; `sentence` says why. `kind` is one of FAILURE_KINDS."""

    kind: str
    sentence: str


FAILURE_KINDS = ("refused", "full", "protocol")

Handshake: TypeAlias = Hello | Challenge | Proof | Welcome
Request: TypeAlias = (
    Open
    | MatchRequest
    | ReserveRequest
    | GetRequest
    | ContainsRequest
    | PinRequest
    | DropRequest
    | SuspectRequest
    | PlaceRequest
    | RetainRequest
    | ListRequest
    | VerifyRequest
    | PresenceRequest
    | NoteRequest
    | NotedRequest
    | Release
    | Fill
    | Commit
    | Close
    | Await
    | Flush
    | InfoRequest
    | SpacesRequest
    | StatsRequest
    | MissCurveRequest
    | Ping
    | Bye
)
Reply: TypeAlias = (
    Opened
    | Matched
    | SharedMatch
    | Reserved
    | Blocks
    | Contained
    | Listed
    | Counted
    | Retained
    | Done
    | Document
    | Failure
)
Message: TypeAlias = Handshake | Request | Reply

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(body: bytes | bytearray) -> Message:
    """Raises `RemoteProtocolError` for anything that is not exactly one known message."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"a message that cannot be read: {error}") from error


def match_end_of(flags: int) -> MatchEnd:
    """Why a lease ends at a block, by its LISTED_ flags."""
    return most_telling(end for flag, end in _ENDS_BY_FLAG.items() if flags & flag)


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """A run of little-endian u64."""
    packed = array("Q", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_numbers(run: bytes) -> list[int]:
    packed = array("Q")
    packed.frombytes(run)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
