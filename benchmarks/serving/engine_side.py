"""The engine in this process, with no server: `python -m benchmarks.serving.engine_side` reads a `Load` from stdin."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from benchmarks.serving.rounds import Load, Round
from kvtier.engine.answer import StreamPiece
from kvtier.engine.client import EngineClient, StreamEvent
from kvtier.engine.config import EngineConfig
from kvtier.engine.engine import Engine
from kvtier.engine.sampling_params import SamplingParams


class _Clock:
    """Notes the times of each stream's first token and of the end of the last stream."""

    def __init__(self, num_streams: int) -> None:
        self.first_at: dict[str, float] = {}
        self.num_tokens = 0
        self.ended_at = 0.0
        self.is_over = threading.Event()
        self._num_left = num_streams

    def put(self, news: Sequence[tuple[str, StreamEvent]]) -> None:
        now = time.perf_counter()
        for request_id, one in news:
            if isinstance(one, Exception):
                raise one
            if isinstance(one, StreamPiece):
                if one.token_ids:
                    self.first_at.setdefault(request_id, now)
                    self.num_tokens += len(one.token_ids)
                if one.completion is not None:
                    self._num_left -= 1
        if not self._num_left:
            self.ended_at = now
            self.is_over.set()


def run(load: Load) -> list[Round]:
    params = SamplingParams(max_tokens=load.output_tokens, temperature=0.0, ignore_eos=True)
    rounds = []
    with EngineClient(Engine(msgspec.convert(load.engine, EngineConfig))) as client:
        for number in range(load.num_rounds + 1):
            clock = _Clock(load.num_streams)
            prompts = load.prompts(number)
            started_at = time.perf_counter()
            for prompt in prompts:
                client.submit(prompt, params, sink=clock)
            if not clock.is_over.wait(600):
                raise TimeoutError("the streams did not end")
            first_tokens_s = [at - started_at for at in clock.first_at.values()]
            rounds.append(
                Round(seconds=clock.ended_at - started_at, first_tokens_s=first_tokens_s, num_tokens=clock.num_tokens)
            )
    return rounds[1:]


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(run(msgspec.json.decode(sys.stdin.buffer.read(), type=Load))))
