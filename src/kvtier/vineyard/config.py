"""The settings of both halves, under the name that programs import from Vineyard: `vineyard.llm.config`."""

from kvtier.vineyard.file_config import FileCacheConfig, FilesystemType
from kvtier.vineyard.vineyard_config import VineyardCacheConfig

__all__ = ["FileCacheConfig", "FilesystemType", "VineyardCacheConfig"]
