"""The same streams over HTTP, against a running deployment: `python -m benchmarks.serving.http_side PORT`.

Plain asyncio with little work per chunk, so that the client is not the bottleneck.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import msgspec

from benchmarks.serving.rounds import Load, Round

_MODEL = "model"
_END = b"data: [DONE]"


async def _stream(port: int, body: bytes, is_connected: asyncio.Event, start: asyncio.Event) -> tuple[float, int]:
    """The time of the first token, and the number of tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}"
    is_connected.set()
    await start.wait()
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
    first_at, last = 0.0, b""
    while line := await reader.readline():
        if line.startswith(b"data: "):
            first_at = first_at or time.perf_counter()
            if line.startswith(_END):
                break
            last = line
        elif line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
            raise RuntimeError((line + await reader.read()).decode(errors="replace"))
    writer.close()
    usage = json.loads(last[6:])["usage"]
    return first_at, int(usage["completion_tokens"])


async def one_round(port: int, load: Load, prompts: list[list[int]]) -> Round:
    start = asyncio.Event()
    connected = [asyncio.Event() for _ in prompts]
    bodies = [
        json.dumps(
            {
                "model": _MODEL,
                "prompt": prompt,
                "max_tokens": load.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        for prompt in prompts
    ]
    streams = [
        asyncio.create_task(_stream(port, body, event, start)) for body, event in zip(bodies, connected, strict=True)
    ]
    for event in connected:
        await event.wait()
    started_at = time.perf_counter()
    start.set()
    found = await asyncio.gather(*streams)
    seconds = time.perf_counter() - started_at
    return Round(
        seconds=seconds,
        first_tokens_s=[first_at - started_at for first_at, _ in found],
        num_tokens=sum(count for _, count in found),
    )


async def run(port: int, load: Load) -> list[Round]:
    return [await one_round(port, load, load.prompts(number)) for number in range(load.num_rounds + 1)][1:]


if __name__ == "__main__":
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(run(int(sys.argv[1]), load))))
