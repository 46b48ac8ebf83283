"""Prompts in, tokens out: owns model, KV arena, scheduler and runner, and does one step at a time. One thread.

With `async-N`, up to N steps are with the device while the next one is prepared: a step's tokens are looked at only
after the following ones were handed over; where those are long, before the last of them. A request that ends there has
computed a few tokens too many; they are dropped.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch
from prometheus_client import CollectorRegistry

from kvtier.blocks.namespace import Namespace
from kvtier.engine.answer import AnswerText, Completion, StreamPiece, cached_tokens_of, completion_of
from kvtier.engine.config import EngineConfig
from kvtier.engine.device.chunk_graphs import MAX_GRAPH_TOKENS
from kvtier.engine.device.decode_graphs import MAX_GRAPH_ROWS
from kvtier.engine.device.kv_arena import KvArena
from kvtier.engine.device.prefill_probe import measure_prefill
from kvtier.engine.device.runner import Runner, Submitted, TokenResult
from kvtier.engine.device.sizing import allocated_bytes, choose_num_blocks
from kvtier.engine.device.step_timer import NoStepTimer, StepTimer
from kvtier.engine.device.warm_up import compile_kernels
from kvtier.engine.gc_control import collect_young
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.block_manager import make_block_manager
from kvtier.engine.schedule.request import FinishReason, Request, Status
from kvtier.engine.schedule.scheduler import Scheduler
from kvtier.engine.tier_building import has_tiers, make_hierarchy
from kvtier.errors import ConfigError, EngineStopped, InvalidParameter, PromptTooLong
from kvtier.latency_guard import LatencyGuard
from kvtier.models.loading import LoadedModel, LoadProgress, load_model
from kvtier.models.progress import terminal_progress
from kvtier.models.prompt_encoder import PromptEncoder
from kvtier.models.tokenizer import TextStream, Tokenizer
from kvtier.observe.metrics import EngineCounts, EngineMetrics
from kvtier.sizes import format_size
from kvtier.tiers.explanation import Explanation, MatchEnd
from kvtier.tiers.speeds import Speeds
from kvtier.transfer.copiers.cuda_copier import CudaCopier
from kvtier.transfer.copiers.geometry import Geometry
from kvtier.transfer.copiers.host_copier import HostCopier
from kvtier.transfer.traffic import Traffic
from kvtier.transfer.transfer import NoTransfer, Transfer

logger = logging.getLogger(__name__)

_TIER_WAIT_S = 0.01
"""How long a step that has nothing to compute waits for a tier before it looks for new requests."""

_MAX_EXPLANATIONS = 4096
_EXPLAINED_TOKENS = 64
"""So many tokens of a prompt tell whether another namespace has its first block, also one with larger blocks."""


StepOutput = tuple[Request, StreamPiece]
"""A request, and what a step brought for it."""


class Engine:
    """Everything for one model. Call `step` while `has_requests`."""

    def __init__(
        self,
        config: EngineConfig,
        registry: CollectorRegistry | None = None,
        *,
        progress: LoadProgress = terminal_progress,
    ) -> None:
        """Loads the model and takes the device's memory. Raises `ConfigError` when that cannot work.

        `metrics` are in `registry`, or in one of their own; `progress` shows how far the weights are.
        """
        self.config = config
        device = _device_of(config.device)
        _make_current(device)
        if config.quantization == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            raise ConfigError("quantization fp8 needs a GPU of compute capability 8.9 or more")
        allocated_before_bytes = allocated_bytes(device)
        self.loaded: LoadedModel = load_model(
            config.model,
            dtype=config.dtype,
            device=device,
            load_format=config.load_format,
            quantization=config.quantization,
            revision=config.revision,
            cache_dir=config.cache_dir,
            trust_remote_code=config.trust_remote_code,
            max_model_len=config.max_model_len,
            progress=progress,
        )
        folder = self.loaded.folder
        self.tokenizer = None if folder is None else Tokenizer(folder, trust_remote_code=config.trust_remote_code)
        model_config = self.loaded.config
        layout = model_config.kv_layout(config.block_size, self.loaded.dtype)
        num_blocks = choose_num_blocks(config, self.loaded, layout, device, allocated_before_bytes)
        # A block is kept spare: yoco copies from one while its request has all others.
        capacity = (num_blocks - 1) * config.block_size
        self.max_model_len = min(config.max_model_len or model_config.max_position_embeddings, capacity)
        self.prompts = PromptEncoder(self.tokenizer, self.max_model_len)
        self._token_ids = list[Annotated[int, msgspec.Meta(ge=0, lt=model_config.vocab_size)]]
        self._eos_token_ids = {*model_config.eos_token_ids, *(self.tokenizer.eos_token_ids if self.tokenizer else ())}
        try:
            self.arena = KvArena(num_blocks, layout, device)
        except RuntimeError as error:
            nbytes = format_size(num_blocks * layout.block_bytes)
            raise ConfigError(f"the device {device} has no room for {nbytes} of KV: set kv_cache_space") from error
        self.runner = Runner(
            self.loaded.model,
            self.arena,
            max_num_requests=config.max_num_requests,
            max_model_len=self.max_model_len,
            eos_token_ids=sorted(self._eos_token_ids),
            max_graph_rows=min(config.max_num_requests, MAX_GRAPH_ROWS)
            if config.cuda_graphs and device.type == "cuda"
            else 0,
            max_graph_tokens=min(config.max_num_batched_tokens, MAX_GRAPH_TOKENS),
            has_arrivals=has_tiers(config),
        )
        if device.type == "cuda":
            compile_kernels(self.runner, config, self.max_model_len)
        self._namespace_fields = self.loaded.namespace_fields(layout, salt=config.salt)
        self._namespace = self._namespace_fields.digest()
        self.speeds = Speeds()
        self._latency_guard = LatencyGuard()
        self._timer: StepTimer | NoStepTimer = NoStepTimer()
        self.transfer = self._make_transfer(device)
        # Its threads would keep it, and all it holds, after the engine.
        weakref.finalize(self, self.transfer.close).atexit = False
        self.scheduler = self._make_scheduler()
        self._explanations: OrderedDict[str, Explanation] = OrderedDict()
        self._under_way: deque[Submitted] = deque()
        self._texts: dict[Request, AnswerText] = {}
        self._requests: dict[str, list[Request]] = {}
        self._is_broken = False
        self._is_closed = False
        self.num_steps = 0
        self.schedule_s = 0.0
        self._counts = EngineCounts(num_blocks=num_blocks)
        self.metrics = EngineMetrics(self._counts, registry)
        logger.info(
            "%s: weights %s, %d KV blocks of %d tokens (%s) left, prompts up to %d tokens",
            model_config.architecture,
            format_size(self.loaded.weights_bytes),
            num_blocks,
            config.block_size,
            format_size(self.arena.nbytes),
            self.max_model_len,
        )

    @property
    def namespace(self) -> Namespace:
        """Whose blocks this engine shares, on the device and in every tier."""
        return self._namespace

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests or bool(self._under_way)

    @property
    def holds_blocks(self) -> bool:
        """Blocks that nobody needs are being copied away: a step, even an empty one, takes back those that are."""
        return self.transfer.has_stores

    def encode(self, text: str) -> list[int]:
        """From any thread. Raises as `PromptEncoder.encode` does."""
        return self.prompts.encode(text)

    def add(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams, salt: str = ""
    ) -> list[Request]:
        """Take in a prompt; one request for each of its `n` answers. It shares blocks with those of the same `salt`.

        Raises a `RequestError` with one sentence, and nothing changes, when it cannot be served.
        """
        began_at = time.perf_counter()
        if self._is_broken:  # starting over was interrupted too
            self._start_over()
        if self._is_closed:
            raise EngineStopped("this engine was closed")
        if self.transfer.is_foreign:
            raise EngineStopped("this engine belongs to the process that made it: make one after the fork")
        if request_id in self._requests:
            raise InvalidParameter(f"a request with the id {request_id} is being served already")
        if not isinstance(salt, str):
            raise InvalidParameter("cache_salt must be text")
        tokens = self.encode(prompt) if isinstance(prompt, str) else self._checked(prompt)
        if not tokens:
            raise InvalidParameter("the prompt is empty")
        if len(tokens) >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens, but at most {self.max_model_len - 1} leave room for an answer"
            )
        if params.stop_strings and (self.tokenizer is None or self.tokenizer.is_absent):
            raise InvalidParameter("stop strings need a tokenizer, and this model has none")
        room = self.max_model_len - len(tokens)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        requests = []
        for index in range(params.n):
            request = Request(
                f"{request_id}-{index}" if params.n > 1 else request_id,
                tokens,
                params.choice(index),
                max_tokens=max_tokens,
                index=index,
                group=request_id,
                salt=salt,
            )
            self._texts[request] = AnswerText(
                self._text_stream(params), params.stop_strings, min_tokens=params.min_tokens
            )
            self.scheduler.add(request)
            requests.append(request)
        self._requests[request_id] = requests
        self._note_levels()
        self.scheduler.note_taken_in(time.perf_counter() - began_at)
        return requests

    def wake(self) -> None:
        """From any thread: if a step waits for a tier, look for new requests first."""
        self.transfer.wake()

    def abort(self, request_id: str) -> list[StepOutput]:
        """End a prompt's requests now, wherever they are. Does nothing for one that is over."""
        news = [
            (request, self._end(request, FinishReason.ABORT))
            for request in list(self._requests.get(request_id, ()))
            if request.status is not Status.FINISHED
        ]
        self._note_levels()
        return news

    def requests_of(self, request_id: str) -> list[Request]:
        """The requests of a prompt, one for each answer, until it is forgotten."""
        return self._requests[request_id]

    def step(self) -> list[StepOutput]:
        """Prepare and hand over a step, then look at the results of one that is due, if any.

        If it raises, every request has ended and the prefix cache is empty: an interrupt or a failure may have come
        between any two lines, and a block that was never filled must not be used.
        """
        _make_current(self.arena.device)
        if self._is_broken:
            self._start_over()
        try:
            news = self._step()
        except BaseException:
            self._start_over()
            raise
        self._note_levels()
        return news

    def _start_over(self) -> None:
        self._is_broken = True
        for requests in self._requests.values():
            for request in requests:
                request.prefetch.leave()
                if request.status is not Status.FINISHED:
                    request.status = Status.FINISHED
                    request.finish_reason = FinishReason.ERROR
                    self.runner.forget(request)
                    self._count_end(request)
        self._drop_steps()
        self.transfer.start_over()
        self.scheduler = self._make_scheduler()
        self._note_levels()
        self._is_broken = False

    def _note_levels(self) -> None:
        counts, scheduler = self._counts, self.scheduler
        counts.num_steps = self.num_steps
        counts.running_requests = len(scheduler.running)
        counts.waiting_requests = len(scheduler.waiting)
        counts.used_blocks = counts.num_blocks - scheduler.blocks.num_free_blocks

    def _count_end(self, request: Request) -> None:
        """Of a request that never got its turn no token counts."""
        assert request.finish_reason is not None
        was_admitted = request.was_admitted
        self._counts.note_end(
            request.finish_reason.value,
            request.prompt_tokens if was_admitted else 0,
            cached_tokens_of(request) if was_admitted else {},
        )

    def _make_scheduler(self) -> Scheduler:
        config, namespace = self.config, self._namespace
        blocks = make_block_manager(config.block_manager, self.arena.num_blocks, config.block_size, namespace)
        return Scheduler(
            blocks,
            max_num_requests=config.max_num_requests,
            max_num_batched_tokens=config.max_num_batched_tokens,
            transfer=self.transfer,
        )

    def _make_transfer(self, device: torch.device) -> Transfer | NoTransfer:
        config, layout = self.config, self.arena.layout
        hierarchy = make_hierarchy(config, layout, self._namespace_fields, self.name, device_bytes=self.arena.nbytes)
        if hierarchy is None:
            return NoTransfer()
        self._timer = timer = StepTimer(self.speeds, device)
        if not config.always_load:
            measure_prefill(self.runner, timer, config, self.max_model_len)
        let_pass = self._latency_guard.let_pass
        geometry = Geometry(self.arena.layers, layout)
        traffic = Traffic(
            hierarchy,
            CudaCopier(geometry, let_pass=let_pass) if device.type == "cuda" else HostCopier(geometry),
            self.speeds,
            layout=layout,
            chunk_tokens=config.max_num_batched_tokens,
            always_loads=config.always_load,
            let_pass=let_pass,
        )
        return Transfer(traffic, self.arena.num_blocks)

    @property
    def name(self) -> str:
        """What people call the model: never a path."""
        return str(self.config.model).rstrip("/").rsplit("/", 1)[-1]

    def close(self) -> None:
        """Give the tiers back, and the host's memory of steps under way. The engine takes no prompt after it."""
        self._is_closed = True
        self._drop_steps()
        for requests in self._requests.values():
            for request in requests:
                request.prefetch.leave()
        self.transfer.close()

    def _drop_steps(self) -> None:
        """Nobody asks for the tokens of what is under way."""
        while self._under_way:
            self._under_way.popleft().close()

    def _step(self) -> list[StepOutput]:
        news: list[StepOutput] = []
        if len(self._under_way) >= self.config.num_steps_ahead > 1 and self._under_way[-1].is_long:
            # The device has enough to do, and half as many launches in its queue as that holds: who waits for room in
            # it holds up copies, too. And tokens need not wait until another such step is handed over.
            news = self._look_at_oldest()
        started_at = time.perf_counter()
        num_preemptions = self.scheduler.num_preemptions
        step = self.scheduler.schedule()
        self._counts.num_preemptions += self.scheduler.num_preemptions - num_preemptions
        self.schedule_s += time.perf_counter() - started_at
        if not step.is_empty:
            self._timer.start()
            self._under_way.append(self.runner.submit(step))
            self._timer.stop(step)
            started_at = time.perf_counter()
            self.scheduler.submitted(step)
            self.schedule_s += time.perf_counter() - started_at
            self.num_steps += 1
        elif self.scheduler.has_unmatched:
            self.transfer.give_way(is_idle=not self._under_way)
            return news
        elif not self._under_way:
            assert self.transfer.has_tiers or not self.scheduler.has_requests, "requests wait for nothing"
            self.transfer.wait(_TIER_WAIT_S)
            return news
        if step.is_empty or len(self._under_way) > self.config.num_steps_ahead:
            news += self._look_at_oldest()
        return news

    def _look_at_oldest(self) -> list[StepOutput]:
        """Give the tokens of the oldest step under way to their requests."""
        if not self._under_way[0].is_done:
            collect_young()
        submitted = self._under_way.popleft()
        news = []
        for row, result in zip(submitted.rows, submitted.wait(), strict=True):
            request = row.request
            request.num_in_flight -= 1
            if request.status is not Status.FINISHED:
                news.append((request, self._take(request, result)))
        self._counts.output_tokens += len(news)
        if news:
            self._latency_guard.note_handed_out()
        return news

    def _take(self, request: Request, result: TokenResult) -> StreamPiece:
        token_id = result.token_id
        request.tokens.append(token_id)
        if result.logprobs is not None:
            request.logprobs.append(result.logprobs)
        if not request.times.first_token_at:
            request.times.first_token_at = time.monotonic()
        text = self._texts[request]
        params = request.params
        is_long_enough = request.num_outputs >= params.min_tokens
        is_end = token_id in params.stop_token_ids or (token_id in self._eos_token_ids and not params.ignore_eos)
        if (is_end and is_long_enough) or (not is_end and text.push(token_id) and is_long_enough):
            return self._end(request, FinishReason.STOP, [token_id])
        if request.num_outputs >= request.max_tokens:
            return self._end(request, FinishReason.LENGTH, [token_id])
        return _piece(request, [token_id], text.take())

    def _end(self, request: Request, reason: FinishReason, token_ids: Sequence[int] = ()) -> StreamPiece:
        self.scheduler.finish(request, reason)
        self.runner.forget(request)
        request.times.finished_at = time.monotonic()
        self._explain(request)
        text = self._texts[request]
        text.finish()
        if text.is_stopped and reason is FinishReason.LENGTH:  # its last characters were still held back
            request.finish_reason = FinishReason.STOP
        self._count_end(request)
        return _piece(request, list(token_ids), text.take(), completion_of(request, text.text))

    def explain(self, request_id: str) -> Explanation:
        """Why no more of a prompt was cached, of one of the last few thousand. Raises `InvalidParameter` for others."""
        known = self._explanations.get(request_id)
        if known is None:
            raise InvalidParameter(f"no request with the id {request_id} has ended lately")
        return known

    def _explain(self, request: Request) -> None:
        ending = request.prefetch.ending
        if ending is None:
            return
        block_tokens = self.config.block_size
        detail, num_first = ending.detail, min(request.prompt_tokens, max(block_tokens, _EXPLAINED_TOKENS))
        if request.salt:  # where it is cached without the salt, or with another, says nothing about this one
            num_first = 0
            if ending.reason is MatchEnd.NEVER_STORED:
                detail = "the request has a cache_salt of its own"
        explanation = Explanation(
            request_id=request.id,
            model=self.name,
            namespace=self._namespace.hex(),
            prompt_tokens=request.prompt_tokens,
            block_tokens=block_tokens,
            cached_tokens=cached_tokens_of(request),
            ended_at_tokens=min(ending.position * block_tokens, request.prompt_tokens),
            reason=ending.reason,
            tier=ending.tier,
            detail=detail,
            first_tokens=tuple(request.tokens[:num_first]),
        )
        self._explanations[request.id] = explanation
        if request.index == 0:
            self._explanations[request.group] = explanation
        while len(self._explanations) > _MAX_EXPLANATIONS:
            self._explanations.popitem(last=False)
        self.transfer.note(explanation)
        if request.index == 0 and request.id != request.group:  # by the id that the caller knows, too
            self.transfer.note(msgspec.structs.replace(explanation, request_id=request.group))

    def forget(self, request_id: str) -> None:
        """Its outputs were read."""
        for request in self._requests.pop(request_id, ()):
            self._texts.pop(request, None)

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's tokens. Without a loop over those of a list of ints: there may be a million."""
        vocab_size = self.loaded.config.vocab_size
        given: object = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(given, Sequence) or isinstance(given, (str, bytes, bytearray)):
            raise InvalidParameter(f"a prompt is text or a list of token ids, not {prompt!r}")
        try:
            return msgspec.convert(given, self._token_ids)
        except msgspec.ValidationError:
            pass  # numbers of another kind may do; of others, say which
        tokens = [token_id.item() if hasattr(token_id, "item") else token_id for token_id in given]
        for token_id in tokens:
            if type(token_id) is not int:
                raise InvalidParameter(f"a prompt is text or a list of token ids, and {token_id!r} is no token id")
        for token_id in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token_id < vocab_size:
                raise InvalidParameter(f"the token id {token_id} is not in the vocabulary of {vocab_size}")
        return tokens

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None or self.tokenizer.is_absent:
            return None
        return TextStream(self.tokenizer, skip_special_tokens=params.skip_special_tokens)


def _piece(request: Request, token_ids: list[int], text: str, completion: Completion | None = None) -> StreamPiece:
    logprobs = None
    if request.params.logprobs is not None:
        logprobs = request.logprobs[len(request.logprobs) - len(token_ids) :]
    return StreamPiece(request.index, token_ids, text, logprobs, completion)


def _make_current(device: torch.device) -> None:
    """For the calling thread: kernels and events go to the current GPU, whatever their tensors say."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def _device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, not {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name} is not there: torch finds {torch.cuda.device_count()} GPUs")
    return device
