"""Finds which of several requests makes a step fail: each is run alone, as a copy that its owner does not see.

The engine's thread calls it after a failure, with an otherwise empty scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from kvtier.engine.device.runner import Runner
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.request import FinishReason, Request
from kvtier.engine.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Trial:
    """Runs requests to their next token. After each run, even a failed one, scheduler and runner have forgotten it."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner

    def culprit(self, suspects: Iterable[Request]) -> Request | None:
        """The first of `suspects` that cannot be run alone; None if each of them can."""
        return next((request for request in suspects if not self._runs(_copy(request))), None)

    def is_device_well(self) -> bool:
        """Whether anything at all can be run: a prompt of one token, with greedy sampling."""
        return self._runs(Request("trial", [0], SamplingParams(temperature=0.0, max_tokens=1), max_tokens=1))

    def _runs(self, request: Request) -> bool:
        try:
            # Without the tiers: a prompt that is matched there would wait.
            self._scheduler.waiting.join(request)
            is_sampled = False
            while not is_sampled:
                step = self._scheduler.schedule()
                if step.is_empty:
                    return False
                submitted = self._runner.submit(step)
                is_sampled = bool(submitted.wait())
                self._scheduler.submitted(step)
        except Exception as error:
            logger.debug("a trial failed: %r", error)
            return False
        finally:
            self._runner.forget(request)
        self._scheduler.finish(request, FinishReason.ABORT)
        return True


def suspects_of(requests: Sequence[Request], at_risk: Collection[Request]) -> list[Request]:
    """The requests that may have made a step fail, the most likely first: the newest, the others were computed before.

    `at_risk` are those of the step; without any, all are suspects.
    """
    suspects = [one for one in reversed(requests) if one in at_risk] or list(reversed(requests))
    return sorted(suspects, key=lambda one: one.num_outputs)


def _copy(request: Request) -> Request:
    """A copy at the same position of its answer, without blocks."""
    copy = Request(
        "trial",
        request.tokens,
        request.params,
        max_tokens=request.num_outputs + 1,
        index=request.index,
        salt=request.salt,
        arrived_at=0.0,
    )
    copy.prompt_tokens = request.prompt_tokens
    return copy
