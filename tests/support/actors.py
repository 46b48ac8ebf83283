"""Client processes for the tests of this folder, and what tests and they have in common.

An actor is `python -m tests.support.actors ACT JSON`: it answers in lines of JSON on standard output and goes on
when it reads a line, so that a test and it meet at known points. Bytes are derived from the hash: a wrong one shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

import kvtier
from kvtier import BlockHash, KvLayout, Namespace, block_hashes
from kvtier.client.client import CacheClient
from kvtier.errors import KvtierError, TierFull
from kvtier.testing.servers import ServerProcess, start_cache_server
from kvtier.testing.signals import send_signal
from kvtier.wire import messages as wire
from kvtier.wire.frames import HEADER_BYTES, encode_frame
from kvtier.wire.session import ClientSession
from tests.support.waiting import CALL_S, LIMIT_S

ROOT = Path(__file__).parents[2]

LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=80, dtype="float16", block_tokens=16)
"""10,240 bytes a block in slots of 12 KiB."""

BLOCK_BYTES = LAYOUT.block_bytes
NAMESPACE = Namespace(bytes(range(32)))
OTHER_NAMESPACE = Namespace(bytes(range(32, 64)))


def chain(seed: int, num_blocks: int) -> list[BlockHash]:
    """The hashes of a prompt that belongs to `seed`."""
    return block_hashes(NAMESPACE, [seed] * (num_blocks * LAYOUT.block_tokens), LAYOUT.block_tokens)


def payload(block_hash: BlockHash, nbytes: int = BLOCK_BYTES) -> bytes:
    return (block_hash * (nbytes // len(block_hash) + 1))[:nbytes]


def payloads(hashes: Sequence[BlockHash]) -> list[bytes]:
    return [payload(block_hash) for block_hash in hashes]


def empty_buffers(count: int) -> list[bytearray]:
    return [bytearray(BLOCK_BYTES) for _ in range(count)]


def read_all(client: CacheClient, hashes: Sequence[BlockHash]) -> list[bytes]:
    """The bytes that `get` returns for the leading part of `hashes`."""
    into = empty_buffers(len(hashes))
    return [bytes(buffer) for buffer in into[: client.get(hashes, into)]]


def open_client(address: str, token: str | None = None, timeout_s: float = CALL_S) -> CacheClient:
    return kvtier.connect(address, token=token, layout=LAYOUT, namespace=NAMESPACE, timeout_s=timeout_s)


def stays(is_so: Callable[[], object], for_s: float) -> bool:
    """`is_so` holds each time it is asked during `for_s`."""
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        if not is_so():
            return False
        time.sleep(0.05)
    return True


def held(client: CacheClient) -> tuple[object, object, object]:
    """The server's counts of leased, reserved and held bytes."""
    stats = client.stats()
    return stats["leases"], stats["reservations"], stats["held_bytes"]


NOTHING_HELD = (0, 0, 0)


def anonymous_bytes(server: ServerProcess) -> int:
    """The server's own memory, without the arena's pages that it has mapped."""
    for line in Path(f"/proc/{server.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/PID/status")


@contextlib.contextmanager
def restarted(server: ServerProcess, memory: str = "64MiB") -> Iterator[ServerProcess]:
    """A new server at the addresses of one that was killed."""
    port = int(server.tcp.rpartition(":")[2]) if "tcp" in server.addresses else 0
    again = start_cache_server(server.folder, memory=memory, tcp=bool(port), port=port)
    try:
        yield again
    finally:
        again.stop()
        assert again.process.stdout is not None
        again.process.stdout.close()


@contextlib.contextmanager
def hung(server: ServerProcess) -> Iterator[None]:
    """The server does not run meanwhile; its sockets still take connections."""
    server.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.send_signal(signal.SIGCONT)


def handshaken(sock: socket.socket, token: str | None) -> None:
    """Take a raw socket through the handshake."""
    session = ClientSession("test", os.urandom(wire.HOLDER_BYTES), token.encode() if token else None)
    answer: wire.Message | None = session.hello
    while answer is not None:
        sock.sendall(encode_frame(0, wire.encode(answer)))
        answer = session.shake(receive_message(sock))


def receive_message(sock: socket.socket) -> wire.Message:
    """Raises `ConnectionResetError` when the peer has closed."""
    header = sock.recv(HEADER_BYTES, socket.MSG_WAITALL)
    if len(header) < HEADER_BYTES:
        raise ConnectionResetError("closed by the peer")
    body_bytes = int.from_bytes(header[12:16], "little")
    return wire.decode(sock.recv(body_bytes, socket.MSG_WAITALL))


def raw_socket(address: str) -> socket.socket:
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = address.removeprefix("unix:")
    else:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        target = (host, int(port))
    sock.settimeout(LIMIT_S)
    try:
        sock.connect(target)
    except BaseException:
        sock.close()
        raise
    return sock


# --- the test's side ---------------------------------------------------------------------------------------------


class Actor:
    """A process that runs one of the acts below."""

    def __init__(self, act: str, **arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.actors", act, json.dumps(arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self) -> dict[str, object]:
        """The actor's next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the actor ended with status {self._process.wait()} without a word"
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def has_spoken(self) -> bool:
        """A line waits to be heard, or the actor has ended."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def send_signal(self, number: signal.Signals) -> None:
        send_signal(self.pid, number)

    def stop(self) -> None:
        self.send_signal(signal.SIGSTOP)

    def wait(self) -> int:
        return self._process.wait(LIMIT_S)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def actor(act: str, **arguments: object) -> Iterator[Actor]:
    started = Actor(act, **arguments)
    try:
        yield started
    finally:
        started.end()


# --- the actors' side --------------------------------------------------------------------------------------------


def _say(**answer: object) -> None:
    print(json.dumps(answer), flush=True)


def _is_told() -> bool:
    """The test has written a line."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def hold(address: str, leased_seed: int, reserved_seed: int, num_blocks: int) -> None:
    """Lease one prompt, reserve and half write another, and wait."""
    with open_client(address) as client:
        leased = client.match(chain(leased_seed, num_blocks))
        reservation = client.reserve(chain(reserved_seed, num_blocks))
        for view in reservation.views()[: num_blocks // 2]:
            view[: BLOCK_BYTES // 2] = b"\xff" * (BLOCK_BYTES // 2)
        reservation.commit(0, 1)
        _say(leased=leased.num_blocks, reserved=reservation.num_blocks)
        sys.stdin.readline()


def read_again_and_again(address: str, seed: int, num_blocks: int) -> None:
    """Copy a leased prompt out of the arena again and again until a line arrives; report rounds and wrong blocks."""
    hashes = chain(seed, num_blocks)
    right = payloads(hashes)
    rounds = wrong = 0
    with open_client(address) as client, client.match(hashes) as lease:
        is_told = False
        while not is_told:
            is_told = _is_told()
            copies = [bytes(view) for view in lease.views()]
            wrong += sum(copy != bytes_ for copy, bytes_ in zip(copies, right, strict=True))
            rounds += 1
            if rounds == 1:
                _say(leased=lease.num_blocks)
        _say(rounds=rounds, wrong=wrong)


def write_again_and_again(address: str, seed: int, num_blocks: int) -> None:
    """Write into a reservation again and again until a line arrives; then write the right bytes and commit."""
    hashes = chain(seed, num_blocks)
    right = payloads(hashes)
    rounds = 0
    with open_client(address) as client, client.reserve(hashes) as reservation:
        views = reservation.views()
        is_told = False
        while not is_told:
            is_told = _is_told()
            for view in views:
                view[:] = bytes([rounds % 256]) * BLOCK_BYTES
            rounds += 1
            if rounds == 1:
                _say(reserved=reservation.num_blocks)
        for view, bytes_ in zip(views, right, strict=True):
            view[:] = bytes_
        _say(rounds=rounds, committed=reservation.commit())


def mix(
    address: str, token: str | None, seed: int, seconds: float, num_prompts: int, num_blocks: int, may_fail: bool
) -> None:
    """match, get, set, drop and contains at random, at full speed. `may_fail`: the server may go away meanwhile."""
    rng = random.Random(seed)
    counts = dict.fromkeys(("operations", "read", "stored", "full", "wrong", "failures", "dropped"), 0)
    into = empty_buffers(num_blocks)
    with open_client(address, token) as client:
        _say(ready=True)
        sys.stdin.readline()
        until = time.monotonic() + seconds
        while time.monotonic() < until and not _is_told():
            hashes = chain(rng.randrange(num_prompts), rng.randrange(1, num_blocks + 1))
            counts["operations"] += 1
            match rng.randrange(10):
                case 0 | 1 | 2:
                    with client.match(hashes) as lease:
                        if lease.has_views:
                            read = [bytes(view) for view in lease.views()]
                        else:
                            read = [bytes(buffer) for buffer in into[: lease.fetch(into)]]
                    _compare(counts, hashes, read)
                case 3 | 4 | 5:
                    _compare(counts, hashes, [bytes(buffer) for buffer in into[: client.get(hashes, into)]])
                case 6 | 7 | 8:
                    try:
                        counts["stored"] += client.set(hashes, payloads(hashes), deferred=rng.random() < 0.3)
                    except TierFull:
                        counts["full"] += 1
                case _:
                    client.contains(hashes)
                    try:
                        counts["dropped"] += client.drop(rng.sample(hashes, min(3, len(hashes))))
                    except KvtierError:
                        if not may_fail:
                            raise
        if not may_fail:
            client.flush()
        counts["failures"] = int(client.metrics.value(client.metrics.failures))
    _say(**counts)


def _compare(counts: dict[str, int], hashes: Sequence[BlockHash], read: list[bytes]) -> None:
    counts["read"] += len(read)
    counts["wrong"] += sum(bytes_ != payload(block_hash) for block_hash, bytes_ in zip(hashes, read, strict=False))


def fork(address: str, token: str | None, num_blocks: int) -> None:
    """Use a client before a fork, in the child, and afterwards in the parent; the child waits for a line."""
    hashes = chain(1, num_blocks)
    client = open_client(address, token)
    client.set(hashes, payloads(hashes))
    lease = client.match(hashes)
    read_all(client, hashes)
    child = os.fork()
    if not child:
        signal.alarm(100)  # a child that hangs is a failure, not a hanging test
        is_right = read_all(client, hashes) == payloads(hashes)
        own = client.match(hashes)
        _say(child_is_right=is_right, child_leased=own.num_blocks)
        sys.stdin.readline()
        own.release()
        more = chain(2, num_blocks)
        client.set(more, payloads(more))
        is_right = read_all(client, more) == payloads(more)
        client.close()
        os._exit(0 if is_right else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    is_right = read_all(client, hashes) == payloads(hashes)
    _say(child_status=status, parent_is_right=is_right, parent_leased=lease.num_blocks)
    sys.stdin.readline()
    lease.release()
    client.close()
    _say(ended=True)


def fork_under_load(address: str, num_forks: int) -> None:
    """Fork while other threads use the client; say how many children could not use it."""
    hashes = chain(1, 4)
    client = open_client(address)
    client.set(hashes, payloads(hashes))
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            client.contains(hashes)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    failed = 0
    for _ in range(num_forks):
        child = os.fork()
        if not child:
            signal.alarm(100)
            os._exit(0 if all(client.contains(hashes)) else 1)
        failed += os.waitpid(child, 0)[1] != 0
    is_over.set()
    for thread in threads:
        thread.join()
    client.close()
    _say(failed=failed)


def send_mutants(address: str, token: str | None, seed: int, num_frames: int) -> None:
    """Send mutated frames, many to a connection; say how many, and how many connections the server left hanging."""
    rng = random.Random(seed)
    sent = connections = hanging = 0
    while sent < num_frames:
        sock = raw_socket(address)
        connections += 1
        with sock, contextlib.suppress(ConnectionError):
            if rng.random() < 0.9:
                handshaken(sock, token)
                sock.sendall(encode_frame(1, wire.encode(wire.Open(OTHER_NAMESPACE, "mutants", BLOCK_BYTES, 16, ""))))
                opened = receive_message(sock)
                assert isinstance(opened, wire.Opened)
                requests = _requests(rng, opened.space)
                mutants = [mutant(rng, *rng.choice(requests)) for _ in range(24)]
            else:
                handshakes = _handshakes(rng)
                mutants = [mutant(rng, *rng.choice(handshakes)) for _ in range(4)]
            sent += len(mutants)
            sock.sendall(b"".join(mutants))
            with contextlib.suppress(OSError):  # closed by the server already
                sock.shutdown(socket.SHUT_WR)
            try:
                while sock.recv(1 << 16):
                    pass
            except TimeoutError:
                hanging += 1
    _say(sent=sent, connections=connections, hanging=hanging)


def mutants(rng: random.Random, count: int) -> Iterator[bytes]:
    """Messages as `send_mutants` makes them, and every reply: all messages that a client may receive."""
    for _ in range(count):
        source = rng.randrange(10)
        if source == 0:
            yield mutant(rng, *rng.choice(_handshakes(rng)))
        elif source < 5:
            yield mutant(rng, _reply(rng), b"")
        else:
            yield mutant(rng, *rng.choice(_requests(rng, 1)))


def _handshakes(rng: random.Random) -> list[tuple[wire.Message, bytes]]:
    return [
        (wire.Hello("mutant", rng.randbytes(16), rng.randbytes(16)), b""),
        (wire.Challenge(rng.randbytes(16)), b""),
        (wire.Proof(rng.randbytes(32)), b""),
        (wire.Welcome("mutant", rng.randbytes(16), rng.randbytes(32), 1 << 20, 1 << 20, False), b""),
    ]


def _requests(rng: random.Random, space: int) -> list[tuple[wire.Message, bytes]]:
    hashes = b"".join(chain(rng.randrange(8), rng.randrange(1, 4)))
    number = rng.randrange(4)
    return [
        (wire.Open(rng.choice((OTHER_NAMESPACE, Namespace(rng.randbytes(32)))), "mutant", BLOCK_BYTES, 16, "{}"), b""),
        (wire.MatchRequest(space, hashes, number, False), b""),
        (wire.ReserveRequest(space, hashes, number), b""),
        (wire.GetRequest(space, hashes, 2), b""),
        (wire.ContainsRequest(space, hashes), b""),
        (wire.PinRequest(space, hashes, False), b""),
        (wire.DropRequest(space, hashes), b""),
        (wire.PresenceRequest(rng.choice((OTHER_NAMESPACE, NAMESPACE)), hashes), b""),
        (wire.SuspectRequest(space, hashes), b""),
        (wire.ListRequest(space, number), b""),
        (wire.VerifyRequest(space, hashes), b""),
        (wire.Await(number, 1), b""),
        (wire.SpacesRequest(number), b""),
        (wire.MissCurveRequest(number), b""),
        (wire.NoteRequest(f"mutant-{number}", "{}"), b""),
        (wire.NotedRequest(f"mutant-{number}"), b""),
        (wire.Release(number), b""),
        (wire.Fill(number, 0, 1), bytes(BLOCK_BYTES) if rng.random() < 0.3 else b""),
        (wire.Commit(number, 0, 1), b""),
        (wire.Close(number), b""),
        (wire.Flush(), b""),
        (wire.InfoRequest(), b""),
        (wire.StatsRequest(), b""),
        (wire.Ping(), b""),
        (wire.Bye(), b""),
        *([(_reply(rng), b"")] if rng.random() < 0.1 else []),
    ]


def _reply(rng: random.Random) -> wire.Message:
    """Messages that only a server sends."""
    replies: list[wire.Message] = [
        wire.Opened(1),
        wire.Matched(bytes(8), "miss", 1, 0),
        wire.Reserved(bytes(8), bytes(8), 0, 0, 0, ""),
        wire.Blocks(0, 1, True, bytes(8)),
        wire.Contained(b"\1"),
        wire.Counted(1),
        wire.Done(),
        wire.Document("{}"),
        wire.Failure("full", "mutant"),
    ]
    return rng.choice(replies)


def mutant(rng: random.Random, message: wire.Message, data: bytes) -> bytes:
    """A frame with something wrong: mostly in its values, so that many of a connection are read, else anywhere."""
    body = bytearray(wire.encode(message))
    body_bytes, payload_bytes = len(body), len(data)
    kind = rng.randrange(100)
    if kind < 93:
        body = bytearray(_with_a_wrong_value(rng, body))
        body_bytes = len(body)
    elif kind == 93:
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    elif kind == 94:
        body = body[: rng.randrange(len(body))]
    elif kind == 95:
        body_bytes = rng.choice((0, 1, body_bytes + rng.randrange(1, 99), 1 << 24, (1 << 32) - 1, rng.getrandbits(32)))
    elif kind == 96:
        payload_bytes = rng.choice((0, 1, payload_bytes + 1, 1 << 28, (1 << 64) - 1, rng.getrandbits(64)))
    elif kind == 97:
        body = bytearray(rng.randbytes(rng.randrange(1, 200)))
        body_bytes = len(body)
    header = bytearray(encode_frame(rng.getrandbits(32), b"", payload_bytes))
    header[12:16] = body_bytes.to_bytes(4, "little")
    if kind == 98:
        header[rng.randrange(len(header))] ^= 1 << rng.randrange(8)
    elif kind == 99:
        return rng.randbytes(rng.randrange(1, 99))
    return bytes(header) + bytes(body) + data


def _with_a_wrong_value(rng: random.Random, body: bytearray) -> bytes:
    """A message of the same form, one of whose numbers, strings or runs of bytes is another."""
    values = msgspec.msgpack.decode(body)
    if len(values) == 1:
        return bytes(body)
    position = rng.randrange(1, len(values))
    match values[position]:
        case bool(value):
            values[position] = not value
        case int(value):
            values[position] = rng.choice((value ^ 1 << rng.randrange(31), rng.randrange(4), 0, (1 << 63) - 1))
        case str(value):
            values[position] = value + rng.choice(("\0", "é", "x" * 100))
        case bytes(value) if value:
            flipped = bytearray(value)
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            values[position] = bytes(flipped)
    return msgspec.msgpack.encode(values)


_ACTS = {
    act.__name__: act
    for act in (hold, read_again_and_again, write_again_and_again, mix, fork, fork_under_load, send_mutants)
}

if __name__ == "__main__":
    _ACTS[sys.argv[1]](**json.loads(sys.argv[2]))  # type: ignore[operator]
