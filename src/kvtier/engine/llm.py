"""The engine for scripts: `LLM(model).generate(prompts)`. The calling thread does the work."""

from __future__ import annotations

import difflib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from kvtier.engine.answer import Completion, RequestOutput
from kvtier.engine.config import EngineConfig
from kvtier.engine.engine import Engine
from kvtier.engine.progress import prompt_progress
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import ConfigError, InvalidParameter, RequestError
from kvtier.tiers.explanation import Explanation

Prompt = str | Sequence[int]

_WORTH_BEGINNING_S = 0.01
"""The first step begins before all prompts are taken in if the others would take this long, or about two short steps: a
step that has few rows, of prompts that are cached, costs as much."""


class LLM:
    """A model, ready to generate. Use it as a context manager, or `close` it."""

    def __init__(self, model: str, **settings: Any) -> None:
        """`settings` are those of `EngineConfig`. Raises `ConfigError` with one sentence if the model cannot be run."""
        try:
            config = EngineConfig(model=model, **settings)
        except TypeError as error:
            known = EngineConfig.__struct_fields__
            unknown = sorted(settings.keys() - set(known))
            close = [match for name in unknown for match in difflib.get_close_matches(name, known, 1)]
            hint = f"; did you mean {', '.join(close)}?" if close else "; EngineConfig lists all settings"
            raise ConfigError(f"unknown settings: {', '.join(unknown) or error}{hint}") from error
        self.engine = Engine(config)
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answers to `prompts`, texts or lists of token ids, in order. Other threads wait: see `EngineClient`.

        If a prompt cannot be served, its `error` is set; the others are served nevertheless. Cached blocks are shared
        only with calls of the same `cache_salt`.
        """
        if "engine" not in self.__dict__:
            raise ConfigError("this LLM is closed")
        several = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(several)
        else:
            each = list(params)
            if not all(isinstance(one, SamplingParams) for one in each):
                raise InvalidParameter("params must be SamplingParams, or a list with one for each prompt")
            if len(each) != len(several):
                raise InvalidParameter(f"{len(each)} sampling parameters for {len(several)} prompts")
        outputs: list[RequestOutput | None] = [None] * len(several)
        with self._lock, prompt_progress(len(several), is_shown=progress) as advance:
            self._run(several, each, cache_salt, outputs, advance)
        return [output for output in outputs if output is not None]

    def explain(self, request_id: str) -> Explanation:
        """Why no more of a prompt was cached, for one of the last few thousand. Raises `InvalidParameter` for others.

        Only an engine with tiers below the device knows.
        """
        if "engine" not in self.__dict__:
            raise ConfigError("this LLM is closed")
        return self.engine.explain(request_id)

    def close(self) -> None:
        """Give back the device's memory, and what it holds of other tiers."""
        engine = self.__dict__.pop("engine", None)
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        salt: str,
        outputs: list[RequestOutput | None],
        advance: Callable[[int], None],
    ) -> None:
        engine = self.engine
        places: dict[str, int] = {}
        left: dict[str, list[Completion]] = {}  # for prompts in progress: the answers that are complete

        def step() -> None:
            for request, piece in engine.step():
                if piece.completion is None:
                    continue
                group = request.group
                left[group].append(piece.completion)
                if len(left[group]) == len(engine.requests_of(group)):
                    answers = sorted(left.pop(group), key=lambda answer: answer.index)
                    outputs[places[group]] = RequestOutput(group, request.tokens[: request.prompt_tokens], answers)
                    engine.forget(group)
                    advance(1)

        num_tokens, started_at = 0, time.perf_counter()
        has_begun = engine.transfer.has_tiers  # a step would wait for the tiers' answer about the first prompts
        try:
            for place, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                request_id = f"request-{next(self._numbers)}"
                try:
                    requests = engine.add(request_id, prompt, one, salt)
                except RequestError as error:
                    ids = list(prompt) if isinstance(prompt, (list, tuple)) else []
                    outputs[place] = RequestOutput(request_id, ids, error=str(error))
                    advance(1)
                    continue
                places[request_id] = place
                left[request_id] = []
                num_tokens += requests[0].prompt_tokens
                if not has_begun and num_tokens >= engine.config.max_num_batched_tokens:
                    prompt_s = (time.perf_counter() - started_at) / (place + 1)
                    if prompt_s * (len(prompts) - place - 1) > _WORTH_BEGINNING_S:
                        has_begun = True  # with a whole step, which keeps the device busy meanwhile
                        step()
            while left:
                step()
        except BaseException:  # including an interrupt: the next call must find an idle engine
            for request_id in left:
                engine.abort(request_id)
                engine.forget(request_id)
            raise


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    several: list[Any] = list(prompts)
    kinds = set(map(type, several))
    if kinds and all(hasattr(kind, "__index__") and not issubclass(kind, bool) for kind in kinds):
        return [several]
    return several
