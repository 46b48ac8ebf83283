"""Runs steps on the device: one forward pass over all rows, then sampling. Waits only when results are asked for.

Sampled tokens stay on the device and feed the next step, so a step may be handed over before the tokens of earlier
steps are known. Steps run in the order in which they are submitted. Owned by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.engine.constraint.constraints import MakeMasks, TokenMasks
from kvtier.engine.device.chunk_graphs import MAX_GRAPH_TOKENS, ChunkGraphs
from kvtier.engine.device.decode_graphs import DecodeGraphs
from kvtier.engine.device.kv_arena import KvArena
from kvtier.engine.device.mask_upload import MaskUpload
from kvtier.engine.device.prompt_scores import MAX_SLICE_ROWS, PromptScores, ScoredTokens
from kvtier.engine.device.sampler import SampledTokens, Sampler
from kvtier.engine.device.sampling_batch import SamplingBatch, SamplingRow
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.step import Step, StepRow
from kvtier.kernels import reference
from kvtier.kernels.attention import attend
from kvtier.kernels.backend import Backend
from kvtier.kernels.paged_batch import PagedArrays, PagedBatch, PagedRow
from kvtier.kernels.rotation import Rotation
from kvtier.kernels.upload import Download, LastTokens, upload
from kvtier.models.model import Model
from kvtier.transfer.copier import Arrival
from kvtier.transfer.copiers.cuda_copier import NUM_GROUPS, layer_groups

_MAX_TOKENS_AFTER_ARRIVALS = 256
"""Up to this many tokens, a graph that runs after all layers have arrived is faster than going layer by layer."""


Constrain = Callable[[Sequence[Request], MakeMasks], TokenMasks | None]
"""The tokens that each sampling request may have, in memory that is made for them; None if all are free."""


class TokenResult(NamedTuple):
    """A sampled token, and the log-probabilities of it and its likeliest alternatives if they were requested."""

    token_id: int
    logprobs: dict[int, float] | None


class Submitted:
    """A step in flight. `rows` are those that sample; `kept` is where their tokens are stored for the next steps."""

    def __init__(
        self,
        rows: list[StepRow],
        sampled: SampledTokens | None = None,
        kept: LastTokens | None = None,
        *,
        is_long: bool = False,
        over: torch.cuda.Event | None = None,
        scores: PromptScores | None = None,
    ) -> None:
        """`is_long` if it has more tokens than any graph: it takes long, and many launches.

        `over` shows when a step without `rows` is over; a short one needs none. After `wait`, `scored` has the tokens
        of prompts whose log-probabilities were requested.
        """
        self.rows = rows
        self.scored: list[ScoredTokens] = []
        self._scores = scores
        self.is_long = is_long
        self._over = over
        self._results: Download | None = None
        self._read: list[TokenResult] | None = None
        if sampled is None:
            return
        tensors = [sampled.token_ids]
        if sampled.logprobs is not None:
            tensors += [sampled.logprobs.sampled, sampled.logprobs.top_token_ids, sampled.logprobs.top]
        self._results = Download(tensors, kept)

    def close(self) -> None:
        """Drop the step: its tokens are no longer wanted."""
        if self._results is not None:
            self._results.close()
        if self._scores is not None:
            self._scores.close()

    @property
    def is_read(self) -> bool:
        """Its tokens were waited for."""
        return self._read is not None

    @property
    def is_done(self) -> bool:
        """`wait` would return at once."""
        if self._scores is not None and not self._scores.is_done:
            return False
        if self._results is not None:
            return self._results.is_done
        return self._over is None or self._over.query()

    def wait(self) -> list[TokenResult]:
        """The tokens of `rows`, once the device has computed them."""
        if self._read is None:
            self._read = self._wait()
        return self._read

    def _wait(self) -> list[TokenResult]:
        if self._scores is not None:
            self.scored = self._scores.wait()
        if self._results is None:
            if self._over is not None:
                self._over.synchronize()
            return []
        tensors = self._results.wait()
        token_ids = tensors[0].tolist()
        if len(tensors) == 1:
            return [TokenResult(token_id, None) for token_id in token_ids]
        _, own, top_ids, top = (tensor.tolist() for tensor in tensors)
        results = []
        for position, (row, token_id) in enumerate(zip(self.rows, token_ids, strict=True)):
            wanted = row.request.params.logprobs
            logprobs = None
            if wanted is not None:
                logprobs = dict(zip(top_ids[position][:wanted], top[position][:wanted], strict=True))
                logprobs[token_id] = own[position]
            results.append(TokenResult(token_id, logprobs))
        return results


@dataclass(slots=True)
class _Place:
    """The runner's record of the request in a slot."""

    request: Request
    version: int
    num_ids: int


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The requests that a step sampled for, and what the next one needs if it samples for the same."""

    requests: list[Request]
    slot_numbers: list[int]
    batch: SamplingBatch
    slots: torch.Tensor


class _PagedAttention:
    """One step's attention, as models call it."""

    def __init__(
        self,
        arena: KvArena,
        batch: PagedBatch,
        scale: float,
        windows: tuple[int | None, ...],
        arrivals: Sequence[Arrival],
    ) -> None:
        self._caches = arena.layers
        self._batch = batch
        self._scale = scale
        self._windows = windows
        self._arrivals = arrivals

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        for arrival in self._arrivals:
            arrival.precede(layer)
        out = attend(
            query,
            key,
            value,
            self._caches[layer],
            self._batch,
            scale=self._scale,
            window=self._windows[layer],
            rotation=rotation,
        )
        return out.reshape(out.shape[0], -1)


class Runner:
    """One model on one device with its KV arena."""

    def __init__(
        self,
        model: Model,
        arena: KvArena,
        *,
        max_num_requests: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        backend: Backend | None = None,
        max_graph_rows: int = 0,
        max_graph_tokens: int = MAX_GRAPH_TOKENS,
        has_arrivals: bool = True,
    ) -> None:
        """`backend` computes attention; by default the device's own.

        Graphs run decodes of up to `max_graph_rows` rows, and other steps of up to as many rows and `max_graph_tokens`
        tokens. With `has_arrivals`, they are also captured in parts, for steps with arrivals.
        None of `eos_token_ids` is sampled before a request has its `min_tokens`, unless it ignores them.
        """
        self.model = model
        self._backend = backend
        self.arena = arena
        self._device = arena.device
        self._block_tokens = arena.layout.block_tokens
        max_blocks = -(-max_model_len // self._block_tokens)
        self._tables = np.zeros((max_num_requests, max_blocks), np.int32)
        self._places: dict[int, _Place] = {}
        self._last_tokens = torch.zeros(max_num_requests, dtype=torch.int64, device=self._device)
        self._sampler = Sampler(vocab_size=model.config.vocab_size, device=self._device, eos_token_ids=eos_token_ids)
        self._mask_upload = MaskUpload(self._device)
        self._sampling_rows: dict[Request, SamplingRow] = {}
        self._sampling: _Sampling | None = None
        self._scale = float(model.config.head_dim**-0.5)
        self._decode_graphs: DecodeGraphs | None = None
        self._chunk_graphs: ChunkGraphs | None = None
        if max_graph_rows:
            groups = layer_groups(arena.layout, NUM_GROUPS if has_arrivals else 1)
            self._decode_graphs = DecodeGraphs(
                self._forward,
                max_rows=max_graph_rows,
                max_blocks=max_blocks,
                block_tokens=self._block_tokens,
                last_tokens=self._last_tokens,
                kv_heads=arena.layout.kv_heads,
                part_ends=[group.first_layer + group.num_layers for group in groups],
            )
            self._chunk_graphs = ChunkGraphs(
                self._forward,
                max_tokens=max_graph_tokens,
                max_rows=max_graph_rows,
                max_blocks=max_blocks,
                block_tokens=self._block_tokens,
                last_tokens=self._last_tokens,
            )
            with torch.inference_mode():
                self._decode_graphs.capture_all()
                self._chunk_graphs.capture_all()
            torch.cuda.empty_cache()  # warming up took memory for another stream

    def submit(self, step: Step, constrain: Constrain | None = None, *, uses_graphs: bool = True) -> Submitted:
        """Hand a step to the device. Unless `uses_graphs`, its kernels are launched one by one.

        `constrain` is asked which tokens may be sampled once everything before sampling is with the device; it may wait
        for the tokens of earlier steps.
        """
        with torch.inference_mode():
            if step.copies:
                self._put_behind(step.arrivals)  # a source may be among the arrivals
                self.arena.copy(step.copies)
            sampling = [row for row in step.rows if row.samples]
            hidden = self._hidden_states(step, self._token_ids(step), uses_graphs=uses_graphs)
            is_long = step.num_tokens > MAX_GRAPH_TOKENS
            scores = self._scores_of(step, hidden)
            if not sampling:
                return Submitted([], is_long=is_long, over=self._end_so_far() if is_long else None, scores=scores)
            states = self._last_states(step, hidden, len(sampling))
            together = self._sampling_of(sampling)
            logits = self.model.logits(states)
            if constrain is None:
                sampled = self._sampler.sample(logits, together.batch)
            else:
                sampled = self._sample_constrained(logits, together, constrain)
            kept = LastTokens(self._last_tokens, together.slots)
            return Submitted(sampling, sampled, kept, is_long=is_long, scores=scores)

    def _scores_of(self, step: Step, hidden: torch.Tensor) -> PromptScores | None:
        if not any([row.scores for row in step.rows]):
            return None
        max_rows = min(MAX_SLICE_ROWS, len(self._tables))
        return PromptScores(step, hidden, self.model.logits, max_rows=max_rows, vocab_size=self.model.config.vocab_size)

    def _sample_constrained(self, logits: torch.Tensor, sampling: _Sampling, constrain: Constrain) -> SampledTokens:
        try:
            masks = constrain(sampling.requests, self._mask_upload.make)
            allowed = None if masks is None else self._mask_upload.upload(masks)
            return self._sampler.sample(logits, sampling.batch, allowed)
        finally:
            self._mask_upload.done()

    def _end_so_far(self) -> torch.cuda.Event | None:
        """An event at the end of everything handed over so far. None on a CPU, where it is done."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait until the device has done everything handed over."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def forget(self, request: Request) -> None:
        """Forget a finished request. The step being handed over may still sample for it; the token is dropped."""
        row = self._sampling_rows.pop(request, None)
        if row is not None:
            self._sampler.close(row)
            self._sampling = None

    def _hidden_states(self, step: Step, tokens: npt.NDArray[np.int64], *, uses_graphs: bool) -> torch.Tensor:
        """The hidden states of all tokens, followed by those of some padding."""
        num_tokens, num_rows = step.num_tokens, len(step.rows)
        decode_graphs = self._decode_graphs if uses_graphs else None
        if decode_graphs is not None and num_tokens == num_rows:
            graph_rows = decode_graphs.size_for(num_rows)
            if graph_rows is not None:
                batch = self._batch(step, num_padding_rows=graph_rows - num_rows)
                return decode_graphs.run(tokens, batch, step.arrivals)
        chunk_graphs = self._chunk_graphs if uses_graphs else None
        if chunk_graphs is not None and (not step.arrivals or num_tokens <= _MAX_TOKENS_AFTER_ARRIVALS):
            size = chunk_graphs.size_for(num_tokens, num_rows)
            if size is not None:
                self._put_behind(step.arrivals)
                batch = self._batch(
                    step,
                    num_empty_rows=size.num_rows - num_rows,
                    num_padding_tokens=size.num_tokens - num_tokens,
                )
                return chunk_graphs.run(tokens, batch, size)
        uploaded = self._batch(step).upload(self._device, self._backend)
        return self._forward(self._on_device(tokens), uploaded, step.arrivals)

    def _put_behind(self, arrivals: Sequence[Arrival]) -> None:
        """Make work handed to the device from now on run after all their layers have arrived."""
        for arrival in arrivals:
            arrival.precede(self.arena.layout.layers - 1)

    def _batch(
        self, step: Step, *, num_padding_rows: int = 0, num_empty_rows: int = 0, num_padding_tokens: int = 0
    ) -> PagedArrays:
        return PagedArrays.lay_out(
            [PagedRow(self._table_of(row.request), row.count, row.start + row.count, row.writes) for row in step.rows],
            block_tokens=self._block_tokens,
            num_padding_rows=num_padding_rows,
            num_empty_rows=num_empty_rows,
            num_padding_tokens=num_padding_tokens,
        )

    def _forward(self, tokens: torch.Tensor, batch: PagedBatch, arrivals: Sequence[Arrival] = ()) -> torch.Tensor:
        attention = _PagedAttention(self.arena, batch, self._scale, self.model.config.windows, arrivals)
        hidden: torch.Tensor = self.model(tokens, batch.positions, attention)
        return hidden

    def _table_of(self, request: Request) -> npt.NDArray[np.int32]:
        """The request's block ids; only new ones are copied."""
        ids = request.blocks.ids
        place = self._places.get(request.slot)
        if place is None or place.request is not request or place.version != request.blocks.version:
            place = self._places[request.slot] = _Place(request, request.blocks.version, 0)
        table: npt.NDArray[np.int32] = self._tables[request.slot]
        if place.num_ids < len(ids):
            table[place.num_ids : len(ids)] = ids[place.num_ids :]
            place.num_ids = len(ids)
        return table

    def _token_ids(self, step: Step) -> npt.NDArray[np.int64]:
        """The tokens of all rows. A token that only the device knows is `~s`: the last one of slot `s`."""
        tokens = np.empty(step.num_tokens, np.int64)
        place = 0
        for row in step.rows:
            known = row.request.tokens
            if row.count > 1:
                tokens[place : place + row.count] = known[row.start : row.start + row.count]
            else:
                tokens[place] = known[row.start] if row.start < len(known) else ~row.request.slot
            place += row.count
        return tokens

    def _on_device(self, tokens: npt.NDArray[np.int64]) -> torch.Tensor:
        (on_device,) = upload([tokens], self._device)
        return reference.fed(on_device, self._last_tokens) if (tokens < 0).any() else on_device

    def _last_states(self, step: Step, hidden: torch.Tensor, num_sampling: int) -> torch.Tensor:
        """The hidden states of the last token of each row that samples."""
        if num_sampling == step.num_tokens:
            return hidden[:num_sampling]
        last_places = np.cumsum([row.count for row in step.rows]) - 1
        (places,) = upload([last_places[[row.samples for row in step.rows]]], self._device)
        return hidden[places]

    def _sampling_of(self, rows: list[StepRow]) -> _Sampling:
        """The last step's sampling if its rows are the same: it has already advanced as far as needed."""
        requests = [row.request for row in rows]
        slots = [request.slot for request in requests]
        last = self._sampling
        if last is not None and last.requests == requests and last.slot_numbers == slots:
            return last
        batch = self._sampler.batch(
            [self._sampling_row(request) for request in requests],
            [request.num_tokens - request.prompt_tokens - 1 for request in requests],
        )
        (on_device,) = upload([np.array(slots, np.int64)], self._device)
        self._sampling = _Sampling(requests, slots, batch, on_device)
        return self._sampling

    def _sampling_row(self, request: Request) -> SamplingRow:
        row = self._sampling_rows.get(request)
        if row is None:
            # Only penalties need the tokens, and there may be a million.
            tokens = request.tokens if request.params.has_penalties else []
            num_prompt = request.prompt_tokens
            row = self._sampler.open(request.params, tokens[:num_prompt], tokens[num_prompt:])
            self._sampling_rows[request] = row
        return row
