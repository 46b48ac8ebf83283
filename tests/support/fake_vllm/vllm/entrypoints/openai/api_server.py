"""A server that answers as vLLM's does, on a Unix socket, and does what a request's field `fake` tells it to.

It imports the standard library only, and starts in a moment. Answers are the words of the prompt. `fake` may have:

    delay_s     wait before the head of the answer
    word_s      wait before each word
    hold        say nothing at all before the connection is closed
    die_after   be killed once so many words were sent; 0: before the head
    status      another status, with an error
    unwell      the engine of this name answers 500, and is not well from then on
    raw         these bytes (base64), whatever they are, and nothing else
    endless     "head": headers without end; "body": an answer without end
    num_bytes   an answer of this size

Responses are stored in memory, as by vLLM with its store enabled: they can be read, continued and cancelled.

`/fake/requests` has what was asked, and how that ended. The environment's FAKE_VLLM (JSON)
may have `fail`, the last words of one that cannot start, and `marks`, a folder for a file per start.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import sys
import time
import uuid

_ORDERS = json.loads(os.environ.get("FAKE_VLLM", "{}"))


class Server:
    def __init__(self, name: str, names: list[str]) -> None:
        self.name = name
        self.names = names
        self.requests: list[dict[str, object]] = []
        self.is_well = True
        self.responses: dict[str, dict[str, object]] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            await self.exchange(reader, writer)

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, target, _ = first.split(" ")
        headers = [line.split(": ", 1) for line in lines]
        length = next((int(value) for name, value in headers if name == "content-length"), 0)
        body = await reader.readexactly(length)
        if target == "/health":
            await send(writer, 200 if self.is_well else 503, b"")
        elif target == "/v1/models":
            models = [{"id": name, "object": "model", "root": "root", "max_model_len": 4096} for name in self.names]
            await send(writer, 200, json.dumps({"object": "list", "data": models}).encode())
        elif target == "/metrics":
            await send(writer, 200, b"vllm:num_requests_running 0.0\n", "text/plain")
        elif target == "/fake/requests":
            await send(writer, 200, json.dumps(self.requests).encode())
        else:
            await self.answer(method, target, headers, body, reader, writer)

    async def answer(self, method, target, headers, body, reader, writer) -> None:
        record = {
            "method": method,
            "target": target,
            "headers": headers,
            "body": base64.b64encode(body).decode(),
            "ended": "",
        }
        self.requests.append(record)
        try:
            document = json.loads(body)
        except ValueError:
            document = {}
        fake = document.get("fake") or {}
        if fake.get("unwell") == self.name:
            self.is_well = False
            fake["status"] = 500
        working = asyncio.ensure_future(self.answered(method, target, document, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        record["ended"] = "answered" if working.done() and working.exception() is None else "aborted"
        for task in (working, leaving):
            task.cancel()
            with contextlib.suppress(BaseException):
                await task

    async def answered(self, method, target, document, writer) -> None:
        path = target.partition("?")[0]
        if not path.startswith("/v1/responses") or "fake" in document:
            await answer(target, document, writer)
            return
        response_id = path.removeprefix("/v1/responses").strip("/").partition("/")[0]
        wanted = response_id or document.get("previous_response_id")
        if wanted and wanted not in self.responses:
            error = {"message": f"Response with id '{wanted}' not found.", "type": "invalid_request_error", "code": 404}
            await send(writer, 404, json.dumps({"error": error}).encode())
        elif method not in ("GET", "POST"):
            await send(writer, 405, b'{"detail":"Method Not Allowed"}')
        elif response_id:
            found = self.responses[response_id]
            found["status"] = "cancelled" if path.endswith("/cancel") else found["status"]
            await send(writer, 200, json.dumps(found).encode())
        else:
            name = document.get("request_id") or f"resp_{uuid.uuid4().hex}"
            response = {"id": name, "object": "response", "status": "completed", "output": words_of(document)}
            self.responses[name] = response
            if document.get("stream"):
                created = {"response": response, "sequence_number": 0, "type": "response.created"}
                await stream(document, {}, writer, f"event: response.created\ndata: {json.dumps(created)}\n\n".encode())
            else:
                await send(writer, 200, json.dumps(response).encode())


async def send(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json") -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nserver: fake\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def answer(target: str, document: dict, writer: asyncio.StreamWriter) -> None:
    fake = document.get("fake") or {}
    await asyncio.sleep(fake.get("delay_s", 0))
    if fake.get("hold"):
        await asyncio.Event().wait()
    if fake.get("die_after") == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if "raw" in fake:
        writer.write(base64.b64decode(fake["raw"]))
        await writer.drain()
    elif fake.get("endless") == "head":
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x-more: " + b"x" * 1000 + b"\r\n")
            await writer.drain()
    elif fake.get("endless") == "body":
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            await chunk(writer, b"data: " + b"x" * 65536 + b"\n\n")
    elif "status" in fake:
        error = {"error": {"message": f"refused with {fake['status']}", "type": "BadRequestError", "code": 400}}
        await send(writer, fake["status"], json.dumps(error).encode())
    elif "num_bytes" in fake:
        await send(writer, 200, json.dumps({"text": "x" * fake["num_bytes"]}).encode())
    elif target.startswith("/v1/embeddings"):
        texts = document["input"] if isinstance(document["input"], list) else [document["input"]]
        data = [{"index": index, "embedding": [float(len(text))]} for index, text in enumerate(texts)]
        await send(writer, 200, json.dumps({"data": data[::-1], "usage": {"prompt_tokens": len(texts)}}).encode())
    elif document.get("stream"):
        await stream(document, fake, writer)
    else:
        await send(writer, 200, json.dumps(whole(document)).encode())


def words_of(document: dict) -> list[str]:
    if "messages" in document:
        content = document["messages"][-1]["content"]
        text = content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
    else:
        text = document.get("prompt") or document.get("input") or ""
    return str(text).split()[: document.get("max_tokens") or 1000]


def whole(document: dict) -> dict:
    words = words_of(document)
    text = " ".join(words)
    choice: dict = {"index": 0, "finish_reason": "stop"}
    if "messages" in document:
        message: dict = {"role": "assistant", "content": text}
        if document.get("tools"):
            function = {"name": document["tools"][0]["function"]["name"], "arguments": '{"city": "Bonn"}'}
            message |= {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
        if document.get("chat_template_kwargs", {}).get("enable_thinking"):
            message["reasoning"] = "hm"
        choice["message"] = message
    else:
        choice["text"] = text
    usage = {"prompt_tokens": len(words), "completion_tokens": len(words), "total_tokens": 2 * len(words)}
    return {"id": "fake", "object": "answer", "model": document.get("model"), "choices": [choice], "usage": usage}


async def stream(document: dict, fake: dict, writer: asyncio.StreamWriter, first: bytes = b"") -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    if first:
        await chunk(writer, first)
    words = words_of(document)
    is_chat = "messages" in document
    if document.get("tools"):
        name = document["tools"][0]["function"]["name"]
        for part in ({"name": name, "arguments": '{"ci'}, {"arguments": 'ty": "Bonn"}'}):
            await event(writer, {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": part}]}})
        words = []
    for number, word in enumerate(words):
        await asyncio.sleep(fake.get("word_s", 0))
        text = word if number == 0 else f" {word}"
        await event(writer, {"index": 0, "delta": {"content": text}} if is_chat else {"index": 0, "text": text})
        if fake.get("die_after") == number + 1:
            await asyncio.sleep(0.05)  # what was written is on its way
            os.kill(os.getpid(), signal.SIGKILL)
    end = {"index": 0, "finish_reason": "stop"}
    await event(writer, {**end, "delta": {}} if is_chat else {**end, "text": ""})
    if document.get("stream_options"):
        usage = {"prompt_tokens": len(words), "completion_tokens": len(words)}
        await chunk(writer, f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
    await chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def event(writer: asyncio.StreamWriter, choice: dict) -> None:
    await chunk(writer, f"data: {json.dumps({'choices': [choice]})}\n\n".encode())


async def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", required=True)
    parser.add_argument("--served-model-name", nargs="+", default=["model"])
    given, _ = parser.parse_known_args()
    if "marks" in _ORDERS:
        with open(os.path.join(_ORDERS["marks"], str(time.time_ns())), "w", encoding="utf-8") as mark:
            json.dump({"argv": sys.argv[1:], "cuda": os.environ.get("CUDA_VISIBLE_DEVICES")}, mark)
    if "fail" in _ORDERS:
        print(_ORDERS["fail"], file=sys.stderr, flush=True)
        sys.exit(3)
    server = Server(os.path.basename(given.uds).removesuffix(".sock"), given.served_model_name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(given.uds)  # never over an existing file, like vLLM
    listening = await asyncio.start_unix_server(server.serve, sock=listener, limit=1 << 28)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    print("fake vLLM is there", flush=True)
    async with listening:
        await ended.wait()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
