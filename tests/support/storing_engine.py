"""A fake engine over a real cache server in this process: it stores what it computes there, as engines do."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvtier.api.config import ApiConfig, ApiKey, CacheAddress
from kvtier.blocks.hashing import block_hashes, salted_root
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace, NamespaceFields
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.client.client import CacheClient
from kvtier.client.connecting import connect
from kvtier.engine.process.messages import ChatPrompt, Submit, Tokenize, Tokenized, TokenPrompt
from kvtier.transport.address import UnixAddress
from tests.support.fake_engine import HELLO, FakeEngine, Script, Step, accepted, config_of, fake_engine, pieces

BLOCK_TOKENS = 4
LAYOUT = KvLayout(layers=1, kv_heads=1, block_tokens=BLOCK_TOKENS, head_dim=512, dtype="float8_e4m3fn")


def fields_of(weights: str = "weights") -> NamespaceFields:
    return NamespaceFields(layout=LAYOUT, weights=weights, model_config={"layers": 1, "rope": {"theta": 10_000}})


def tokens_of(prompt: ChatPrompt) -> list[int]:
    """A token for each word, and one before each message, as a chat template would write it."""
    words = [word for message in prompt.messages for word in (f"<{message.role}>", *message.content.split())]
    return [zlib.crc32(word.encode()) >> 1 for word in [*words, "<assistant>"]]


def payload_of(block_hash: bytes) -> bytes:
    return (block_hash * (LAYOUT.block_bytes // len(block_hash) + 1))[: LAYOUT.block_bytes]


@dataclass
class StoringEngine:
    """A deployment without its HTTP server. `computed` has the ends of the warmed pieces."""

    engine: FakeEngine
    server: CacheServer
    address: str
    client: CacheClient
    namespace: Namespace
    folder: Path
    computed: list[int] = field(default_factory=list)
    stores: bool = True

    def config(self, keys: tuple[ApiKey, ...] = ()) -> ApiConfig:
        config = config_of(self.engine, keys=keys)
        model = msgspec.structs.replace(config.models[0], cache=CacheAddress(address=self.address))
        return msgspec.structs.replace(config, models=(model,), prefix_folder=self.folder / "prefixes")

    def script(self, submit: Submit) -> Iterator[Step]:
        prompt = submit.prompt
        if submit.warms and isinstance(prompt, TokenPrompt):
            self.computed.append(len(prompt.token_ids))
            if self.stores:
                root = salted_root(self.namespace, submit.salt)
                hashes = block_hashes(root, prompt.token_ids, BLOCK_TOKENS)
                self.client.set(hashes, [payload_of(one) for one in hashes])
        if isinstance(prompt, ChatPrompt):
            root = salted_root(self.namespace, submit.salt)
            self.engine.uses.note(block_hashes(root, tokens_of(prompt), BLOCK_TOKENS))
        yield accepted(submit)
        yield from pieces(submit, ["yes"])


@contextlib.contextmanager
def storing_engine(folder: Path, *, memory: int = 8 << 20, disk: int | None = 64 << 20) -> Iterator[StoringEngine]:
    """`folder` is best a short one. Without `disk` the server has memory only."""
    address = f"unix:{folder / 'c.sock'}"
    config = CacheServerConfig(
        memory_bytes=memory,
        unix=UnixAddress(str(folder / "c.sock")),
        folder=folder / "cache" if disk else None,
        file_bytes=disk,
    )
    fields = fields_of()
    hello = msgspec.structs.replace(HELLO, namespace=fields.digest().hex(), block_tokens=BLOCK_TOKENS)
    with contextlib.ExitStack() as stack:
        server = CacheServer(config)
        stack.callback(server.close)
        client = stack.enter_context(connect(address, layout=LAYOUT, namespace=fields, name="tiny"))
        engine = stack.enter_context(fake_engine(folder, hello=hello))
        storing = StoringEngine(engine, server, address, client, fields.digest(), folder)
        script: Script = storing.script
        engine.script = script
        engine.tokenizing = _tokenized
        yield storing


def _tokenized(asked: Tokenize) -> Step:
    assert isinstance(asked.prompt, ChatPrompt)
    return Tokenized(asked.number, tokens_of(asked.prompt))
