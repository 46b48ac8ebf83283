"""Vineyard's KV cache for LLMs: its classes and parameters, over kvtier's cache server and chunk files."""

from kvtier.vineyard.file_config import FileCacheConfig, FilesystemType
from kvtier.vineyard.kv_cache import KVCache
from kvtier.vineyard.kv_tensor import KVTensor
from kvtier.vineyard.vineyard_config import VineyardCacheConfig

__all__ = ["FileCacheConfig", "FilesystemType", "KVCache", "KVTensor", "VineyardCacheConfig"]
