"""A named prefix as it is kept: its name and numbers in one small file, its hashes and text in another."""

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
"""Of the documents and the system message of one prefix."""
MAX_BLOCKS = 1 << 20
MAX_TTL_S = 10 * 366 * 86_400.0
SEPARATOR = "\n\n"
"""Between two documents, and between the last one and the question."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE_ID = re.compile(r"[0-9a-f]{32}")


def is_name(text: str) -> bool:
    """Names are safe in a path, a URL, a page and a terminal."""
    return _NAME.fullmatch(text) is not None


NAME_IN_WORDS = f"letters, digits, dots, dashes and underscores, {MAX_NAME_CHARACTERS} at most, the first no sign"


class PrefixRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`root` is where the chain of its hashes begins: the namespace, or with a salt a digest of both. `first` is the
    hash of its first block: prefixes that share blocks have it in common.

    `key` is the name of the API key whose chats begin so. `file` is the name of the file with the rest; `hits` counts
    requests that named the prefix. Times are seconds of the epoch.
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
            raise ValueError(f"a prefix's name has {NAME_IN_WORDS}")
        if len(self.model) > MAX_MODEL_CHARACTERS or len(self.key) > MAX_MODEL_CHARACTERS:
            raise ValueError("a name of a model or a key is too long")
        if not all(map(_DIGEST.fullmatch, (self.namespace, self.root, self.first))):
            raise ValueError(f"namespace, root and hashes have {NAMESPACE_BYTES} bytes in hex")
        if not _FILE_ID.fullmatch(self.file):
            raise ValueError("the file of a prefix has a name of 32 hexadecimal digits")
        if not 0 < self.blocks <= MAX_BLOCKS or not 0 < self.tokens < 1 << 40 or self.hits < 0:
            raise ValueError("the numbers of a prefix are out of range")

    @property
    def namespace_bytes(self) -> Namespace:
        return Namespace(bytes.fromhex(self.namespace))


class PrefixText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a chat with the prefix begins: a system message, if there is one, and documents before the question."""

    documents: list[str]
    system: str | None = None

    def __post_init__(self) -> None:
        if len(self.documents) > MAX_DOCUMENTS:
            raise ValueError(f"a prefix has at most {MAX_DOCUMENTS} documents")
        if self.num_characters > MAX_TEXT_CHARACTERS:
            raise ValueError(f"a prefix has at most {MAX_TEXT_CHARACTERS} characters")
        if not any(self.documents) and not self.system:
            raise ValueError("a prefix needs documents, or a system message")

    @property
    def num_characters(self) -> int:
        return len(self.system or "") + sum(map(len, self.documents))

    def before(self, question: str) -> str:
        """The first message of the user."""
        return SEPARATOR.join([*self.documents, question])

    def messages(self, question: str) -> list[ChatMessage]:
        system = [] if self.system is None else [ChatMessage("system", self.system)]
        return [*system, ChatMessage("user", self.before(question))]


class PrefixContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file of a prefix has; of one that was imported without it there is no `text`."""

    joined_hashes: bytes
    text: PrefixText | None = None

    def __post_init__(self) -> None:
        num_blocks, rest = divmod(len(self.joined_hashes), HASH_BYTES)
        if rest or not 0 < num_blocks <= MAX_BLOCKS:
            raise ValueError("the hashes of a prefix are a run of 32-byte digests")

    @property
    def hashes(self) -> list[BlockHash]:
        return split_hashes(self.joined_hashes)
