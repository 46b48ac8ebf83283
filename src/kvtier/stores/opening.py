"""A disk store's folder is opened: damage is counted, a smaller budget shrinks the files, and blocks come from records.

One thread, before the store has any other. `recovery` decides which records are valid; the I/O is here.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.blocks.layout import slot_bytes_of
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.share import Share
from kvtier.errors import ConfigError
from kvtier.stores.block_bytes import MAX_SEALED_BYTES, BlockBytes
from kvtier.stores.files import BlockCipher
from kvtier.stores.payload_file import PAYLOADS_NAME, PayloadFile
from kvtier.stores.record_file import RecordFile
from kvtier.stores.records import UNIT_BYTES, BlockRecord
from kvtier.stores.recovery import ShrinkPlan, any_sealed, choose, counted_anew, fit, last_counts, units_of
from kvtier.stores.stored_block import StoredBlock, StoreSpace

logger = logging.getLogger(__name__)

SPARE_RECORDS = 1024
_MAX_TRIED = 8
_FAR_COUNT = 1 << 48  # no server writes this many blocks; a damaged record must not exhaust the counter


@dataclass(frozen=True, slots=True)
class OpenedFiles:
    """The files' blocks, ordered by place, and their spaces. `num_units` units of the payloads' file are in use."""

    blocks: list[StoredBlock]
    spaces: dict[Namespace, StoreSpace]
    free_records: list[int]
    num_units: int
    next_sequence: int
    next_use: int
    losses: Counter[str]


class Opening:
    """Makes both files of a folder consistent, within `limit_bytes`. `run` is called once."""

    def __init__(
        self,
        folder: Path,
        payloads: PayloadFile,
        records: RecordFile,
        block_bytes: BlockBytes,
        cipher: BlockCipher | None,
        share_of: Callable[[str], Share | None],
    ) -> None:
        self._folder = folder
        self._payloads = payloads
        self._records = records
        self._bytes = block_bytes
        self._cipher = cipher
        self._share_of = share_of
        self._next_sequence = 1
        self._losses: Counter[str] = Counter()

    def run(self, limit_bytes: int, step_bytes: int) -> OpenedFiles:
        """Raises `ConfigError` if the blocks are encrypted with another key, and `OSError` if the device fails."""
        data_units = self._payloads.nbytes // UNIT_BYTES
        with without_collector():
            found, damaged = self._records.read()
            kept, losses = choose(self._of_our_kind(found), data_units)
        self._losses += losses
        if damaged:
            self._losses["damaged record"] += len(damaged)
        if self._records.nbytes and not self._records.has_header:
            self._losses["header"] += 1
        if self._records.num_missing or (data_units and not self._records.num_records):
            self._losses["truncated records"] += max(1, self._records.num_missing)
        self._records.repair()
        self._records.wipe([*damaged, *(found.keys() - kept.keys())])
        self._records.cut_free(max(kept, default=-1) + 1, data_units + data_units // 8 + SPARE_RECORDS)
        last, last_use = last_counts(found)
        if max(last, last_use) > _FAR_COUNT:
            kept = counted_anew(kept)
            self._records.write(kept.items())
            last, last_use = last_counts(kept)
        self._next_sequence = last + 1
        if data_units * UNIT_BYTES + self._records.nbytes > limit_bytes:
            plan = fit(kept, limit_bytes, step_bytes)
            kept = self._shrink(plan)
            data_units = min(data_units, plan.data_units)
        if self._payloads.nbytes > data_units * UNIT_BYTES:
            self._payloads.cut(data_units * UNIT_BYTES)
        with without_collector():
            spaces: dict[Namespace, StoreSpace] = {}
            blocks = [
                self._bytes.block_of(number, record, self._space_of(record, spaces)) for number, record in kept.items()
            ]
        free_records = [number for number in range(self._records.num_records) if number not in kept]
        return OpenedFiles(blocks, spaces, free_records, data_units, self._next_sequence, last_use + 1, self._losses)

    def _of_our_kind(self, found: dict[int, BlockRecord]) -> dict[int, BlockRecord]:
        """Keep only ciphertext if there is a key, and only plaintext if there is none; forget the others.

        Raises `ConfigError` if everything is ciphertext and there is no key, or a different one: that is a mistake, and
        nothing is lost yet.
        """
        is_sealing = self._cipher is not None
        self._check_key(found)
        if not is_sealing and not any_sealed(found):
            return found
        ours = {
            number: record
            for number, record in found.items()
            if bool(record.seal) == is_sealing and (not is_sealing or record.block_bytes <= MAX_SEALED_BYTES)
        }
        if not is_sealing and found and not ours:
            raise ConfigError(f"the blocks in {self._folder} are encrypted: their server needs the key file")
        if num_others := len(found) - len(ours):
            self._losses["not encrypted" if is_sealing else "encrypted"] += num_others
            if is_sealing:
                logger.warning(
                    "disk store %s: %d blocks were written without a key and are forgotten; their bytes stay in %s "
                    "until they are overwritten: remove the folder to get rid of them",
                    self._folder,
                    num_others,
                    PAYLOADS_NAME,
                )
        return ours

    def _check_key(self, found: dict[int, BlockRecord]) -> None:
        """Record in the header which key is in use, once that is certain: earlier ciphertexts may have another."""
        cipher, records = self._cipher, self._records
        if cipher is None:
            if not any_sealed(found):
                records.key_check = b""
        elif not any_sealed(found) or (not records.key_check and self._opens_any(found, cipher)):
            records.key_check = cipher.key_check
        elif records.key_check not in (b"", cipher.key_check):
            raise ConfigError(
                f"the blocks in {self._folder} are encrypted with another key: use the key file of before, or an empty "
                "folder"
            )

    def _opens_any(self, found: dict[int, BlockRecord], cipher: BlockCipher) -> bool:
        """Whether at least one of a few ciphertexts was made with our key."""
        end = self._payloads.nbytes // UNIT_BYTES
        sealed = (record for record in found.values() if record.seal and record.start + units_of(record) <= end)
        return any(self._bytes.opens(record, cipher) for record in itertools.islice(sealed, _MAX_TRIED))

    def _shrink(self, plan: ShrinkPlan) -> dict[int, BlockRecord]:
        """Carry out a plan so that a crash at any moment loses at most what the plan drops."""
        if plan.dropped:
            self._losses["over the budget"] += len(plan.dropped)
            self._records.wipe(plan.dropped)
            self._records.sync()
        if plan.moved:
            logger.info("disk store %s: moving %d blocks into a smaller file", self._folder, len(plan.moved))
        kept = dict(plan.kept)
        for number, (record, start) in plan.moved.items():
            slot_bytes = slot_bytes_of(record.block_bytes)
            try:
                payload = memoryview(bytearray(record.block_bytes))
                self._payloads.read([record.start], [payload], record.block_bytes, slot_bytes)
            except (OSError, MemoryError):
                self._losses["unreadable"] += 1
                self._records.wipe([number])
                continue
            self._payloads.write([start], [payload], record.block_bytes, slot_bytes)
            kept[number] = record._replace(start=start, sequence=self._next_sequence)
            self._next_sequence += 1
        self._payloads.sync()
        self._records.write((number, kept[number]) for number in plan.moved if number in kept)
        renumbered = {here: there for here, there in plan.renumbered.items() if here in kept}
        self._records.write((there, kept[here]) for here, there in renumbered.items())
        self._records.sync()
        kept = {renumbered.get(number, number): record for number, record in kept.items()}
        self._records.cut(plan.records_bytes)
        return dict(sorted(kept.items(), key=lambda item: item[1].start))

    def _space_of(self, record: BlockRecord, spaces: dict[Namespace, StoreSpace]) -> StoreSpace:
        space = spaces.get(record.namespace)
        if space is None:
            share = self._share_of(record.name)
            space = StoreSpace(record.namespace, record.name, record.block_bytes, record.block_tokens, share)
            spaces[record.namespace] = space
        return space


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Turn off the garbage collector: scanning hundreds of thousands of new objects that all stay takes longer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
