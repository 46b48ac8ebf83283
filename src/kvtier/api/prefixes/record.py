"""The stored form of a named prefix: a record with its name and numbers, and a content file with hashes and text."""

from __future__ import annotations

import re

import msgspec

from kvtier.blocks.hashing import HASH_BYTES, BlockHash, split_hashes
from kvtier.blocks.namespace import NAMESPACE_BYTES, Namespace
from kvtier.engine.process.messages import ChatMessage

MAX_NAME_CHARACTERS = 128
MAX_MODEL_CHARACTERS = 256
MAX_DOCUMENTS = 1024
MAX_TEXT_CHARACTERS = 16 << 20
"""Limit for the documents and the system message of one prefix together."""
MAX_BLOCKS = 1 << 20
MAX_TTL_S = 10 * 366 * 86_400.0
SEPARATOR = "\n\n"
"""The text between two documents, and between the last one and the question."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE_ID = re.compile(r"[0-9a-f]{32}")


def is_name(text: str) -> bool:
    """Whether `text` is a valid name, which is safe in a path, a URL, a page and a terminal."""
    return _NAME.fullmatch(text) is not None


NAME_IN_WORDS = (
    f"at most {MAX_NAME_CHARACTERS} letters, digits, dots, dashes and underscores, starting with a letter or digit"
)


class PrefixRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`root` is the root of the hash chain: the namespace, or with a salt a digest of both. `first` is the hash of the
    first block, which prefixes that share blocks have in common.

    `key` is the name of the API key whose chats begin with the prefix. `file` is the name of its content file; `hits`
    counts requests that began with the prefix. Times are seconds of the epoch.
    """

    name: str
    model: str
    namespace: str
    root: str
    first: str
    key: str = ""
    tokens: int
    blocks: int
    file: str
    has_text: bool
    is_pinned: bool = False
    expires_at: float | None = None
    last_used: float | None = None
    hits: int = 0

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(f"a prefix's name must have {NAME_IN_WORDS}")
        if len(self.model) > MAX_MODEL_CHARACTERS or len(self.key) > MAX_MODEL_CHARACTERS:
            raise ValueError("the name of the model or the key is too long")
        if not all(map(_DIGEST.fullmatch, (self.namespace, self.root, self.first))):
            raise ValueError(f"namespace, root and hashes must have {NAMESPACE_BYTES} bytes in hex")
        if not _FILE_ID.fullmatch(self.file):
            raise ValueError("the name of a prefix's file must have 32 hexadecimal digits")
        if not 0 < self.blocks <= MAX_BLOCKS or not 0 < self.tokens < 1 << 40 or self.hits < 0:
            raise ValueError("the numbers of a prefix are out of range")

    @property
    def namespace_bytes(self) -> Namespace:
        return Namespace(bytes.fromhex(self.namespace))


class PrefixText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The beginning of a chat with the prefix: a system message, if any, and documents before the question."""

    documents: list[str]
    system: str | None = None

    def __post_init__(self) -> None:
        if len(self.documents) > MAX_DOCUMENTS:
            raise ValueError(f"a prefix must not have more than {MAX_DOCUMENTS} documents")
        if self.num_characters > MAX_TEXT_CHARACTERS:
            raise ValueError(f"a prefix must not have more than {MAX_TEXT_CHARACTERS} characters")
        if not any(self.documents) and not self.system:
            raise ValueError("a prefix needs documents or a system message")

    @property
    def num_characters(self) -> int:
        return len(self.system or "") + sum(map(len, self.documents))

    def before(self, question: str) -> str:
        """The text of the user's first message."""
        return SEPARATOR.join([*self.documents, question])

    def messages(self, question: str) -> list[ChatMessage]:
        system = [] if self.system is None else [ChatMessage("system", self.system)]
        return [*system, ChatMessage("user", self.before(question))]


class PrefixContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content file of a prefix. `text` is None if the prefix was imported without it."""

    joined_hashes: bytes
    text: PrefixText | None = None

    def __post_init__(self) -> None:
        num_blocks, rest = divmod(len(self.joined_hashes), HASH_BYTES)
        if rest or not 0 < num_blocks <= MAX_BLOCKS:
            raise ValueError("the hashes of a prefix must be 32-byte digests, one after the other")

    @property
    def hashes(self) -> list[BlockHash]:
        return split_hashes(self.joined_hashes)
