"""The copier for another engine's pages, on whatever device they lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.blocks.layout import KvLayout
from kvtier.transfer.copier import Copier
from kvtier.transfer.copiers.cuda_copier import CudaCopier, Way
from kvtier.transfer.copiers.geometry import Geometry, PageOrder
from kvtier.transfer.copiers.host_copier import HostCopier
from kvtier.transfer.copiers.opaque_pages import OpaquePages


def page_copier(tensors: Sequence[torch.Tensor], layout: KvLayout, *, first_head: int = 0) -> Copier:
    """For tensors as vLLM has them: on the CPU with K transposed, on a GPU in rows.

    Raises `ConfigError` if the tensors cannot be those of such blocks or Triton is missing, and `TierUnavailable` if
    torch's CUDA runtime cannot be found. No engine may use the pages meanwhile.
    """
    if tensors[0].device.type == "cpu":
        return HostCopier(Geometry(tensors, layout, PageOrder.TRANSPOSED_K, first_head=first_head))
    # That engine's steps begin after whole loads, and it sets its own switch interval.
    return CudaCopier(Geometry(tensors, layout, first_head=first_head), num_groups=1, switch_interval_s=None)


def opaque_copier(pages: OpaquePages) -> Copier:
    """For opaque pages. Raises `TierUnavailable` if torch's CUDA runtime cannot be found."""
    if pages.device.type == "cpu":
        return HostCopier(pages)
    return CudaCopier(pages, num_groups=1, way=Way.DIRECT, switch_interval_s=None)
