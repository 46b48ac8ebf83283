"""Prompts in, tokens out: owns model, KV arena, scheduler and runner, and does one step at a time. One thread.

With `async-N`, up to N steps are with the device while the next one is prepared: a step's tokens are read only after
the following steps were handed over; if those are long, before the last of them. A request that ends there has computed
a few tokens too many, which are dropped.

Answers that follow grammars need the previous token to know which may come next. All of a step but its sampling is with
the device by then: the host waits for the previous step, advances the grammars, and hands the sampling over while the
device still computes.
"""

from __future__ import annotations

import functools
import logging
import time
import traceback
import weakref
from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from kvtier.blocks.namespace import Namespace
from kvtier.engine.answer import AnswerText, StreamPiece, cached_tokens_of, completion_of, piece_of
from kvtier.engine.building import make_current, make_parts, make_runner, make_scheduler, make_transfer
from kvtier.engine.canary import Canary
from kvtier.engine.config import EngineConfig
from kvtier.engine.constraint.compiled import CompiledGrammar
from kvtier.engine.constraint.compiler import GrammarCompiler
from kvtier.engine.constraint.constraints import Constraints, MakeMasks, TokenMasks
from kvtier.engine.device.kv_arena import KvArena
from kvtier.engine.device.prompt_scores import ScoredTokens
from kvtier.engine.device.runner import Submitted, TokenResult
from kvtier.engine.explanations import Explanations
from kvtier.engine.gc_control import collect_young
from kvtier.engine.loading_switch import LoadingSwitch
from kvtier.engine.parting.partings import Partings
from kvtier.engine.prefix_uses import PrefixUses
from kvtier.engine.request_checks import check_request
from kvtier.engine.retentions import EngineRetentions
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.savings import Savings
from kvtier.engine.schedule.request import FinishReason, Request, Status
from kvtier.engine.schedule.step import Step, StepRow
from kvtier.engine.trial import Trial, suspects_of
from kvtier.errors import EngineStopped, InvalidGrammar, InvalidParameter
from kvtier.latency_guard import LatencyGuard
from kvtier.models.loading import LoadedModel, LoadProgress
from kvtier.models.progress import terminal_progress
from kvtier.models.prompt_encoder import PromptEncoder
from kvtier.models.tokenizer import Tokenizer
from kvtier.observe.log_limit import LogLimit
from kvtier.observe.metrics import EngineCounts, EngineMetrics, PartingMetrics
from kvtier.sizes import format_size
from kvtier.tiers.explaining import look_again
from kvtier.tiers.explanation import Explanation

logger = logging.getLogger(__name__)

_TIER_WAIT_S = 0.01
"""How long a step with nothing to compute waits for a tier before it looks for new requests."""

StepOutput = tuple[Request, StreamPiece]
"""A request, and the news that a step has for it."""


class Engine:
    """Everything for one model. Call `step` while `has_requests`."""

    def __init__(
        self,
        config: EngineConfig,
        registry: CollectorRegistry | None = None,
        *,
        progress: LoadProgress = terminal_progress,
    ) -> None:
        """Loads the model and takes the device's memory. Raises `ConfigError` if that is impossible.

        `metrics` are in `registry`, by default a new one; `progress` shows the loading of the weights.
        """
        # As large as it is, since everything that serves one model hangs on it, each thing in one place.
        self.config = config
        self.parts = parts = make_parts(config, progress)
        self.prompts = PromptEncoder(parts.tokenizer, parts.max_model_len, parts.loaded.config.vocab_size)
        vocab_size = parts.loaded.config.vocab_size
        self.grammars = GrammarCompiler(parts.tokenizer, vocab_size, parts.eos_token_ids)
        self._constraints = Constraints(vocab_size, parts.eos_token_ids, self.grammars.drop)
        self._namespace_fields = parts.namespace_fields
        self.runner = make_runner(config, parts)
        self._latency_guard = LatencyGuard()
        self.transfer, self._timer = make_transfer(config, parts, self.runner, self.name, self._latency_guard)
        # Their threads would keep them, and all they hold, alive after the engine.
        weakref.finalize(self, self.transfer.close).atexit = False
        weakref.finalize(self, self._constraints.close).atexit = False
        self.scheduler = make_scheduler(self.config, self.parts, self.transfer)
        self._counts = EngineCounts(num_blocks=parts.arena.num_blocks)
        self.uses = PrefixUses()
        self._savings = Savings(self._counts, self.transfer.compute_s)
        self.metrics = EngineMetrics(self._counts, registry)
        self.partings = Partings(
            parts.tokenizer, shows_text=config.explain_text, metrics=PartingMetrics(self.metrics.registry)
        )
        self._hierarchy = None if self.transfer.traffic is None else self.transfer.traffic.hierarchy
        self.retentions = EngineRetentions(self._hierarchy, parts.namespace, config.block_size)
        self._explanations = Explanations(
            self.name, parts.namespace, config.block_size, self.transfer.note, self.partings, self.retentions
        )
        self._canary = Canary(
            self.runner,
            config.canary_share if self.transfer.has_tiers else 0.0,
            is_quantized=bool(parts.namespace_fields.quantization),
            count=self._counts.note_check,
        )
        self.loading = LoadingSwitch(self.transfer, self._counts, parts.namespace)
        self._under_way: deque[Submitted] = deque()
        self._texts: dict[Request, AnswerText] = {}
        self._requests: dict[str, list[Request]] = {}
        self._is_broken = False
        self._is_closed = False
        self._rows_at_risk: Sequence[StepRow] = ()
        """The rows of the step that is being handed over, or whose tokens are being read."""
        self._noted: Step | None = None
        """The step of which the scheduler knows that it is with the device, while it is being handed over."""
        self._early: list[StepOutput] = []
        """News for callers, made while a step was being handed over."""
        self._num_steps_ahead = config.num_steps_ahead(parts.arena.device.type)
        self._num_unexplained = 0
        """Failures since the last token for which no single request was to blame."""
        self._log_limit = LogLimit(logger)
        self.num_steps = 0
        self.schedule_s = 0.0
        logger.info(
            "%s: weights %s, %d KV blocks of %d tokens (%s) left, prompts up to %d tokens",
            parts.loaded.config.architecture,
            format_size(parts.loaded.weights_bytes),
            parts.arena.num_blocks,
            config.block_size,
            format_size(self.arena.nbytes),
            self.max_model_len,
        )

    @property
    def namespace(self) -> Namespace:
        """The namespace whose blocks this engine shares, on the device and in every tier."""
        return self.parts.namespace

    @property
    def loaded(self) -> LoadedModel:
        return self.parts.loaded

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.parts.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.parts.max_model_len

    @property
    def arena(self) -> KvArena:
        return self.parts.arena

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests or bool(self._under_way)

    @property
    def has_idle_work(self) -> bool:
        """`idle_step` has something to do, and nothing else needs doing now."""
        return self._canary.has_work and not self.has_requests

    @property
    def is_checking(self) -> bool:
        """Idle work has begun and is not complete."""
        return self._canary.is_under_way

    def idle_step(self) -> None:
        """Compute a little of what the canary compares. Never raises: a check that fails is dropped."""
        make_current(self.arena.device)
        try:
            finding = self._canary.step(self.scheduler.blocks)
        except Exception as error:
            self._log_limit.warning("canary", "a check of cached blocks failed: %s", str(error))
            self._rewind([])
            return
        if finding is not None:
            self.loading.stop_for(finding)
            self._rewind([])  # nor are blocks used that were loaded before: the device forgets everything it has cached

    def stop_loading(self, because: str) -> None:
        """Load nothing from the tiers: another engine that shares this one's namespace found wrong KV there."""
        if self.loading.stop_as_told(because):
            self._rewind([])

    @property
    def holds_blocks(self) -> bool:
        """Unreferenced blocks are being copied away: a step, even an empty one, takes back those that are done."""
        return self.transfer.has_stores

    def encode(self, text: str) -> list[int]:
        """From any thread. Raises as `PromptEncoder.encode` does."""
        return self.prompts.encode(text)

    def compile(self, params: SamplingParams) -> CompiledGrammar | None:
        """The grammar of `params`, for `add`. From any thread. Raises `InvalidGrammar` if it cannot be compiled."""
        if params.grammar is None:
            return None
        try:
            return self.grammars.compile(params.grammar, params.n)
        except InvalidParameter as error:
            raise InvalidGrammar(str(error)) from error

    def add(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        salt: str = "",
        client: str = "",
        compiled: CompiledGrammar | None = None,
        *,
        warms: bool = False,
    ) -> list[Request]:
        """Take in a prompt; one request for each of its `n` answers. It shares blocks with prompts of the same `salt`.

        Prompts of one `client` wait for each other, and for those of other clients no longer than necessary. `compiled`
        is the grammar of `params`; by default it is compiled here. With `warms`, tiers below the device get all of the
        prompt, even the part that the device had cached. Raises a `RequestError` with one sentence if it cannot be
        served. If anything is raised, nothing has changed.
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
        tokens = self.encode(prompt) if isinstance(prompt, str) else self.prompts.check(prompt)
        check_request(tokens, params, self.parts)
        compiled = compiled or self.compile(params)
        self._canary.let_go(self.scheduler.blocks)
        room = self.max_model_len - len(tokens)
        max_tokens = room if params.max_tokens is None else max(1, min(params.max_tokens, room))
        requests: list[Request] = []
        self._requests[request_id] = requests
        try:
            for index in range(params.n):
                request = Request(
                    f"{request_id}-{index}" if params.n > 1 else request_id,
                    tokens,
                    params.choice(index),
                    max_tokens=max_tokens,
                    index=index,
                    group=request_id,
                    salt=salt,
                    client=client,
                    warms=warms,
                )
                stream = self.prompts.text_stream(
                    tokens, skip_special_tokens=params.skip_special_tokens, kept=params.kept_special_tokens
                )
                text = AnswerText(stream, params.stop_strings, min_tokens=params.min_tokens)
                self.scheduler.add(request)
                self._texts[request] = text
                requests.append(request)
                if compiled is not None:
                    self._constraints.add(request, compiled)
        except BaseException:
            self.abort(request_id)
            self.forget(request_id)
            raise
        self._note_levels()
        self.scheduler.note_taken_in(time.perf_counter() - began_at)
        return requests

    def wake(self) -> None:
        """From any thread: if a step waits for a tier, look for new requests first."""
        self.transfer.wake()

    def abort(self, request_id: str) -> list[StepOutput]:
        """End a prompt's requests now, in any state. Does nothing for those that are over."""
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
        """Prepare and hand over a step, then read the results of one that is due, if any.

        If a request makes it fail, that request ends with the reason "error", and all others start over with their
        tokens so far. If it raises, nothing can be computed any longer, or it was interrupted: every request has ended.
        In both cases the prefix cache is empty: a failure may have come between any two lines, and a block that was
        never filled must not be used.
        """
        make_current(self.arena.device)
        if self._is_broken:
            self._start_over()
        try:
            try:
                news = self._step()
            except Exception as error:
                news = self._take_early() + self._isolate(error)
        except BaseException:
            self._start_over()
            raise
        self._note_levels()
        return news

    def _isolate(self, error: Exception) -> list[StepOutput]:
        """End the request at which a step failed; others start over. Raises `error` if the device computes nothing.

        If every request can be computed alone, all get another chance; if they fail together again at once, the newest
        one ends.
        """
        left = [one for requests in self._requests.values() for one in requests if one.status is not Status.FINISHED]
        culprit = self.scheduler.at
        suspects = suspects_of(left, {row.request for row in self._rows_at_risk})
        self._rewind(left)
        if culprit is None and suspects:
            trial = Trial(self.scheduler, self.runner)
            culprit = trial.culprit(suspects)
            if culprit is None:
                self._num_unexplained += 1
                culprit = suspects[0] if self._num_unexplained > 1 else None
            self._rewind(left)  # a failed trial may have left anything behind
            if not Trial(self.scheduler, self.runner).is_device_well():
                raise error
        elif culprit is None:
            raise error
        news = [] if culprit is None else [(culprit, self._fail(culprit, error))]
        for request in left:
            if request is not culprit:
                self.scheduler.add(request)
        return news

    def _rewind(self, requests: Sequence[Request]) -> None:
        """Afterwards nothing is in flight or cached on the device, and `requests` are not in the scheduler."""
        for request in requests:
            request.prefetch.leave()
            self.runner.forget(request)
            self._constraints.rewind(request)
        self._clear_device()
        for request in requests:
            request.rewind()

    def _fail(self, request: Request, error: Exception) -> StreamPiece:
        """End a request that the scheduler does not have, with its text so far."""
        request.status = Status.FINISHED
        if isinstance(error, InvalidGrammar):
            self._log_limit.warning("grammar", "request %s cannot be answered: %s", request.id, str(error))
            request.finish_reason = FinishReason.DEAD_END
        else:
            trace = "".join(traceback.format_exception(error))
            self._log_limit.warning("failure", "request %s failed, and no other: %s", request.id, trace)
            request.finish_reason = FinishReason.ERROR
        request.times.finished_at = time.monotonic()
        self._note_end(request)
        return piece_of(request, [], "", completion_of(request, self._texts[request].text))

    def _start_over(self) -> None:
        self._is_broken = True
        for requests in self._requests.values():
            for request in requests:
                request.prefetch.leave()
                if request.status is not Status.FINISHED:
                    request.status = Status.FINISHED
                    request.finish_reason = FinishReason.ERROR
                    self.runner.forget(request)
                    self._note_end(request)
        self._take_early()
        self._clear_device()
        self._note_levels()
        self._is_broken = False

    def _clear_device(self) -> None:
        """Afterwards nothing is in flight or cached on the device, and the scheduler has no requests."""
        self._drop_steps()
        self._rows_at_risk = ()
        self._canary.forget()
        self.transfer.start_over()
        self.scheduler = make_scheduler(self.config, self.parts, self.transfer)

    def _note_levels(self) -> None:
        counts, scheduler = self._counts, self.scheduler
        counts.num_steps = self.num_steps
        counts.running_requests = len(scheduler.running)
        counts.waiting_requests = len(scheduler.waiting)
        counts.used_blocks = counts.num_blocks - scheduler.blocks.num_free_blocks
        counts.held_blocks = scheduler.blocks.num_held_blocks

    def _note_end(self, request: Request) -> None:
        """The request is over. If it never got its turn, none of its tokens count; if it warms, computed ones do."""
        assert request.finish_reason is not None
        self._constraints.forget(request)
        cached = cached_tokens_of(request) if request.was_admitted else {}
        num_tokens = request.prompt_tokens if request.was_admitted else 0
        if request.warms:  # it is found in pieces, for which no client would have waited
            num_tokens, cached = num_tokens - sum(cached.values()), {}
        elif request.was_admitted and request.index == 0:
            self.uses.note(request.blocks.hashes)
        self._savings.note_end(request.finish_reason.value, num_tokens, cached)

    @property
    def name(self) -> str:
        """The short name of the model: never a path."""
        return str(self.config.model).rstrip("/").rsplit("/", 1)[-1]

    def close(self) -> None:
        """Give the tiers back, and the host memory of steps in flight. Afterwards the engine accepts no prompt."""
        self._is_closed = True
        self._drop_steps()
        for requests in self._requests.values():
            for request in requests:
                request.prefetch.leave()
        self.retentions.close()
        self._constraints.close()
        self.transfer.close()

    def _drop_steps(self) -> None:
        """Drop the steps in flight: their tokens are no longer wanted."""
        while self._under_way:
            self._under_way.popleft().close()

    def _step(self) -> list[StepOutput]:
        news: list[StepOutput] = []
        if len(self._under_way) >= self._num_steps_ahead > 1 and self._under_way[-1].is_long:
            # The device has enough to do, and half as many launches in its queue as it holds: waiting for room in the
            # queue also holds up copies. And tokens need not wait until another such step is handed over.
            news = self._look_at_oldest()
        started_at = time.perf_counter()
        num_preemptions = self.scheduler.num_preemptions
        step = self.scheduler.schedule()
        self._counts.num_preemptions += self.scheduler.num_preemptions - num_preemptions
        self.schedule_s += time.perf_counter() - started_at
        if not step.is_empty:
            self._timer.start()
            self._rows_at_risk = step.rows
            self._noted = None
            constrain = functools.partial(self._masks, step) if self._constraints else None
            self._under_way.append(self.runner.submit(step, constrain))
            self._rows_at_risk = ()
            self._timer.stop(step)
            if self._noted is not step:
                self._note_submitted(step)
            news += self._take_early()
            self.num_steps += 1
        elif self.scheduler.has_unmatched:
            self.transfer.give_way(is_idle=not self._under_way)
            return news
        elif not self._under_way:
            assert self.transfer.has_tiers or not self.scheduler.has_requests, "requests wait for nothing"
            self.transfer.wait(_TIER_WAIT_S)
            return news
        if step.is_empty or len(self._under_way) > self._num_steps_ahead:
            news += self._look_at_oldest()
        while self._under_way and self._under_way[0].is_read:
            news += self._look_at_oldest()
        return news

    def _note_submitted(self, step: Step) -> None:
        started_at = time.perf_counter()
        self.scheduler.submitted(step)
        self.schedule_s += time.perf_counter() - started_at

    def _masks(self, step: Step, requests: Sequence[Request], make: MakeMasks) -> TokenMasks | None:
        """The tokens that `requests` may have, once the host knows those before. Called when only sampling is left."""
        if self._constraints.waits_for_tokens(requests):
            for submitted in self._under_way:
                self._read(submitted)
        return self._constraints.masks(requests, make, functools.partial(self._beside_masks, step))

    def _beside_masks(self, step: Step) -> None:
        """Do other pending work while threads make the masks of `step`, whose forward pass is on the device."""
        self._note_submitted(step)
        self._noted = step
        while self._under_way and self._under_way[0].is_read:
            self._early += self._look_at_oldest()
        self._rows_at_risk = step.rows

    def _take_early(self) -> list[StepOutput]:
        early, self._early = self._early, []
        return early

    def _read(self, submitted: Submitted) -> list[TokenResult]:
        """The tokens of a step, once the device has them. Advances the grammars."""
        if submitted.is_read:
            return submitted.wait()
        if not submitted.is_done:
            collect_young()
        results = submitted.wait()
        if self._constraints:
            rows = zip(submitted.rows, results, strict=True)
            self._constraints.advance([(row.request, result.token_id) for row, result in rows])
        return results

    def _look_at_oldest(self) -> list[StepOutput]:
        """Give the tokens of the oldest step in flight to their requests."""
        submitted = self._under_way.popleft()
        self._rows_at_risk = submitted.rows
        results = self._read(submitted)
        self._rows_at_risk = ()
        news = [piece for scored in submitted.scored for piece in self._take_scores(scored)]
        num_scored = len(news)
        for row, result in zip(submitted.rows, results, strict=True):
            request = row.request
            request.num_in_flight -= 1
            if request.status is not Status.FINISHED:
                try:
                    piece = self._take(request, result)
                except Exception as error:  # of its text or its stop strings: nothing that other requests share
                    piece = self._give_up(request, error)
                news.append((request, piece))
        self._counts.output_tokens += len(news) - num_scored
        if news:
            self._num_unexplained = 0
            self._latency_guard.note_handed_out()
        return news

    def _take_scores(self, scored: ScoredTokens) -> list[StepOutput]:
        """For a preempted request, some scores were known before. The last ones come with the answer's first token."""
        request, known = scored.request, scored.request.prompt_scores
        if request.status is Status.FINISHED:
            return []
        known += scored.tokens[len(known) - scored.start :]
        return [(request, piece_of(request, [], ""))] if request.lacks_prompt_scores else []

    def _give_up(self, request: Request, error: Exception) -> StreamPiece:
        """End a request whose token could not be processed."""
        self.scheduler.finish(request, FinishReason.ERROR)
        self.runner.forget(request)
        return self._fail(request, error)

    def _take(self, request: Request, result: TokenResult) -> StreamPiece:
        token_id = result.token_id
        if request.params.max_tokens == 0:  # only the prompt was requested
            request.times.first_token_at = time.monotonic()
            return self._end(request, FinishReason.LENGTH)
        end = None if request.params.grammar is None else self._constraints.end_of(request)
        if end is not None and request.num_outputs >= end:  # not known earlier: this token is not part of the answer
            return self._end(request, FinishReason.STOP)
        request.tokens.append(token_id)
        if result.logprobs is not None:
            request.logprobs.append(result.logprobs)
        if not request.times.first_token_at:
            request.times.first_token_at = time.monotonic()
        text = self._texts[request]
        params = request.params
        is_long_enough = request.num_outputs >= params.min_tokens
        is_end = token_id in params.stop_token_ids or (token_id in self.parts.eos_token_ids and not params.ignore_eos)
        if (is_end and is_long_enough) or (not is_end and text.push(token_id) and is_long_enough):
            return self._end(request, FinishReason.STOP, [token_id])
        if end is not None and request.num_outputs >= end:
            return self._end(request, FinishReason.STOP, [token_id])
        if request.num_outputs >= request.max_tokens:
            return self._end(request, FinishReason.LENGTH, [token_id])
        return piece_of(request, [token_id], text.take())

    def _end(self, request: Request, reason: FinishReason, token_ids: Sequence[int] = ()) -> StreamPiece:
        self.scheduler.finish(request, reason)
        self.runner.forget(request)
        request.times.finished_at = time.monotonic()
        self._explanations.add(request)
        self._canary.note(request)
        text = self._texts[request]
        if request.num_outputs:  # otherwise the end of a prompt that ends within a character would be shown
            text.finish()
        if text.is_stopped and reason is FinishReason.LENGTH:  # its last characters were still held back
            request.finish_reason = FinishReason.STOP
        self._note_end(request)
        return piece_of(request, list(token_ids), text.take(), completion_of(request, text.text, text.stop))

    def explain(self, request_id: str) -> Explanation:
        """Why no more of a recent prompt was cached. Raises `InvalidParameter` if it is unknown or too old.

        With a cluster right below the engine, it waits a moment for that: another namespace there may have the prompt.
        """
        explanation = self._explanations.of(request_id)
        asked = None if self._hierarchy is None else self._hierarchy.asked
        return explanation if asked is None else look_again(asked, explanation, self._namespace_fields.document())

    def forget(self, request_id: str) -> None:
        """Its outputs were read."""
        for request in self._requests.pop(request_id, ()):
            self._texts.pop(request, None)
