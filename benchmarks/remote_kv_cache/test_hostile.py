"""The cost of attacks on the cache server to a well-behaved client: its p99, alone and beside each attack.

    python -m benchmarks.remote_kv_cache.test_hostile [--quick] [--json FILE]

The client matches and reads prompts of 512 blocks of a server on its host, through shared memory. The attackers are
processes of their own, over TCP, with a token and without. Each repeat measures alone and beside, turn about; a p99 is
that of all repeats' requests. The bar: an attack at most doubles it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator

import kvtier
from benchmarks.harness import Result, console, finish, make_parser, print_table
from kvtier import KvLayout, Namespace, block_hashes
from kvtier.priority import step_back
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.wire import messages as wire
from kvtier.wire.frames import HEADER_BYTES, encode_frame
from kvtier.wire.session import ClientSession

LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=80, dtype="float16", block_tokens=16)
NAMESPACE = Namespace(bytes(range(32)))
_PROMPT_BLOCKS = 512
_NUM_PROMPTS = 4
_BULK_HASHES = 524_000
_CROWD = 200

Attack = Callable[[str, str], None]
"""An attack that is repeated, given the server's address and its token."""


# --- attacks, each in a process of its own ----------------------------------------------------------------------------


def _connected(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    sock = socket.create_connection((host, int(port)), 10)
    sock.settimeout(60)
    return sock


def _received(sock: socket.socket) -> wire.Message:
    header = sock.recv(HEADER_BYTES, socket.MSG_WAITALL)
    body_bytes = int.from_bytes(header[12:16], "little")
    return wire.decode(sock.recv(body_bytes, socket.MSG_WAITALL))


def _handshaken(address: str, token: str) -> socket.socket:
    sock = _connected(address)
    session = ClientSession("attacker", os.urandom(wire.HOLDER_BYTES), token.encode())
    answer: wire.Message | None = session.hello
    while answer is not None:
        sock.sendall(encode_frame(0, wire.encode(answer)))
        answer = session.shake(_received(sock))
    return sock


def strangers(address: str, token: str) -> None:
    """As many silent connections as allowed."""
    with contextlib.ExitStack() as stack:
        for _ in range(_CROWD):
            stack.enter_context(_connected(address))
        time.sleep(2)


def drips(address: str, token: str) -> None:
    """Connections that send their handshake a byte at a time."""
    hello = encode_frame(0, wire.encode(wire.Hello("slow", bytes(16), bytes(16))))
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_connected(address)) for _ in range(_CROWD)]
        for byte in hello[:-1]:
            for sock in sockets:
                with contextlib.suppress(OSError):
                    sock.send(bytes([byte]))
            time.sleep(0.2)


def guesses(address: str, token: str) -> None:
    """Wrong tokens, as fast as they are refused."""
    _handshaken(address, "not the token of this server")


def presence(address: str, token: str) -> None:
    """Requests for more blocks than any prompt has."""
    hashes = os.urandom(32 * _BULK_HASHES)
    with _handshaken(address, token) as sock:
        while True:
            sock.sendall(encode_frame(1, wire.encode(wire.PresenceRequest(NAMESPACE, hashes))))
            _received(sock)


def matches(address: str, token: str) -> None:
    """Prompts of excessive length."""
    hashes = os.urandom(32 * _BULK_HASHES)
    with _handshaken(address, token) as sock:
        sock.sendall(encode_frame(1, wire.encode(wire.Open(bytes(32), "attack", LAYOUT.block_bytes, 16, ""))))
        opened = _received(sock)
        assert isinstance(opened, wire.Opened)
        for number in range(1, 1 << 30):
            sock.sendall(encode_frame(1, wire.encode(wire.MatchRequest(opened.space, hashes, number, False))))
            _received(sock)


def namespaces(address: str, token: str) -> None:
    """As many namespaces as a connection may open, and requests about all of them."""
    with contextlib.ExitStack() as stack:
        for number in range(8):
            sock = stack.enter_context(_handshaken(address, token))
            for other in range(1000):
                name = (number * 1000 + other).to_bytes(32, "little")
                sock.sendall(encode_frame(1, wire.encode(wire.Open(name, "n" * 256, 1, 1, ""))))
                _received(sock)
        for _ in range(20):
            sock.sendall(encode_frame(1, wire.encode(wire.InfoRequest())))
            _received(sock)


def frames(address: str, token: str) -> None:
    """Invalid frames, each on its own connection."""
    dice = random.Random()
    with contextlib.suppress(OSError), _handshaken(address, token) as sock:
        sock.sendall(encode_frame(1, dice.randbytes(dice.randint(1, 4000))))
        sock.recv(4096)


ATTACKS: dict[str, tuple[Attack, int]] = {
    "silent strangers": (strangers, 2),
    "dripping strangers": (drips, 2),
    "wrong tokens": (guesses, 4),
    "broken frames": (frames, 4),
    "presence of 524,000": (presence, 4),
    "matches of 524,000": (matches, 4),
    "8,000 namespaces": (namespaces, 1),
}
"""Attacks, and the number of attackers."""


def _attack(act: Attack, address: str, token: str) -> None:
    os.setsid()
    step_back(15)  # attackers are on other machines: only the server's work for them counts, not their own
    while True:
        try:
            act(address, token)
        except Exception:  # refused, cut off, or the server is full: as intended
            time.sleep(0.001)


@contextlib.contextmanager
def attacked(server: ServerProcess, act: Attack, count: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_attack, args=(act, server.tcp, server.token), daemon=True) for _ in range(count)
    ]
    for process in processes:
        process.start()
    try:
        time.sleep(1.5)
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


# --- the client that behaves ------------------------------------------------------------------------------------------


class Neighbour:
    """Matches and reads cached prompts."""

    def __init__(self, server: ServerProcess) -> None:
        self.client = kvtier.connect(server.unix, layout=LAYOUT, namespace=NAMESPACE, timeout_s=30.0)
        tokens = [[seed] * (_PROMPT_BLOCKS * LAYOUT.block_tokens) for seed in range(_NUM_PROMPTS)]
        self._prompts = [block_hashes(NAMESPACE, one, LAYOUT.block_tokens) for one in tokens]
        self._into = [bytearray(LAYOUT.block_bytes) for _ in range(_PROMPT_BLOCKS)]
        for number, hashes in enumerate(self._prompts):
            self.client.set(hashes, [bytes([number]) * LAYOUT.block_bytes] * _PROMPT_BLOCKS)

    def ask(self, num_requests: int) -> list[float]:
        """The seconds of requests with pauses between them, as from an engine."""
        times = []
        for number in range(num_requests):
            which = number % _NUM_PROMPTS
            started_at = time.perf_counter()
            count = self.client.get(self._prompts[which], self._into)
            times.append(time.perf_counter() - started_at)
            if count != _PROMPT_BLOCKS or any(block[0] != which for block in self._into):
                raise RuntimeError(f"{count} of {_PROMPT_BLOCKS} blocks came back, or wrong ones")
            time.sleep(0.002)
        return times


def p99_ms(seconds: list[float]) -> float:
    return 1000 * sorted(seconds)[int(0.99 * len(seconds))]


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--attack", action="append", choices=tuple(ATTACKS), help="this one only")
    arguments = parser.parse_args()
    repeats = arguments.repeats or 5
    num_requests = 300 if arguments.quick else 1000
    result = Result(
        "remote_kv_cache.test_hostile",
        {"repeats": repeats, "requests": num_requests, "prompt_blocks": _PROMPT_BLOCKS, "quick": arguments.quick},
    )
    attacks = arguments.attack or list(ATTACKS)
    try:
        for name in attacks:
            act, count = ATTACKS[name]
            console.print(f"{name}: {count} attackers")
            alone: list[float] = []
            beside: list[float] = []
            with cache_server("--max-connections", "256", memory="256MiB", tcp=True) as server:
                neighbour = Neighbour(server)
                with contextlib.closing(neighbour.client):
                    neighbour.ask(num_requests // 10)
                    for _ in range(repeats):
                        alone += neighbour.ask(num_requests)
                        with attacked(server, act, count):
                            beside += neighbour.ask(num_requests)
            ratio = p99_ms(beside) / p99_ms(alone)
            result.rows.append(
                {
                    "attack": name,
                    "attackers": count,
                    "p99 alone ms": round(p99_ms(alone), 2),
                    "p99 beside ms": round(p99_ms(beside), 2),
                    "ratio": round(ratio, 2),
                }
            )
            result.figures[_figure(name)] = ratio
    except BaseException:
        result.write(arguments.json)
        raise
    print_table("a client's p99 beside attackers", result.rows)
    return finish(result, dict.fromkeys(map(_figure, attacks), "<= 2"), arguments.json)


def _figure(attack: str) -> str:
    return f"hostile_p99_x_{attack.replace(' ', '_').replace(',', '')}"


if __name__ == "__main__":
    sys.exit(main())
