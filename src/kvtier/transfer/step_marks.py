"""The device's progress: a mark behind each step handed to it. Owned by the engine's thread. No torch."""

from __future__ import annotations

from collections import deque

from kvtier.transfer.copier import Copier, Mark


class StepMarks:
    """The last step that the device is known to have finished, and all steps after it."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self.num_steps = 0
        self._marks: deque[tuple[int, Mark]] = deque([(0, copier.mark())])

    def note_step(self) -> None:
        """A step was handed to the device."""
        self.num_steps += 1
        self._marks.append((self.num_steps, self._copier.mark()))
        while len(self._marks) > 1 and self._marks[1][1].query():
            self._marks.popleft()

    @property
    def last(self) -> Mark:
        """The mark behind all steps so far."""
        return self._marks[-1][1]

    def after(self, step: int) -> Mark:
        """The mark behind step number `step`."""
        return next((mark for number, mark in self._marks if number >= step), self.last)
