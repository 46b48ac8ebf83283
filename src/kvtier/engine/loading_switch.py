"""Turns loading from the tiers off when the canary finds wrong KV, and on again when an operator says so."""

from __future__ import annotations

import logging

from kvtier.blocks.namespace import Namespace
from kvtier.engine.canary import Finding
from kvtier.observe.metrics import EngineCounts
from kvtier.transfer.transfer import NoTransfer, Transfer

logger = logging.getLogger(__name__)


class LoadingSwitch:
    """The engine's thread calls everything that changes it."""

    def __init__(self, transfer: Transfer | NoTransfer, counts: EngineCounts, namespace: Namespace) -> None:
        self._transfer = transfer
        self._counts = counts
        self._namespace = namespace.hex()[:12]
        self.was_told = False
        """Another engine's canary is why nothing is loaded."""

    @property
    def off_because(self) -> str:
        """Why nothing is loaded; empty while loading is on. Any thread."""
        return self._transfer.off_because

    def stop_for(self, finding: Finding) -> None:
        logger.error(
            "canary: the cache served wrong KV in namespace %s (%s): nothing is loaded from it until a restart or "
            "`kvtier canary --resume`; drop the namespace first (`kvtier cache drop`)",
            self._namespace,
            finding.sentence(),
        )
        self._load_nothing(f"the canary found wrong KV in namespace {self._namespace}: {finding.sentence()}")

    def stop_as_told(self, because: str) -> bool:
        """Another engine that shares this one's namespace found wrong KV there. False if loading was off already."""
        if self._transfer.off_because:
            return False
        logger.error("canary: nothing is loaded until a restart or `kvtier canary --resume`: %s", because)
        self.was_told = True
        self._load_nothing(because)
        return True

    def _load_nothing(self, because: str) -> None:
        self._transfer.off_because = because
        self._counts.is_loading_off = True

    def resume(self) -> None:
        """Load from the tiers again."""
        if self._transfer.off_because:
            logger.warning("canary: loading is on again, as requested")
            self._transfer.off_because = ""
            self.was_told = False
            self._counts.is_loading_off = False
