"""The storage tier (L3): pages by key, outside of this process's memory."""

from tidekv.backends.storage.base import Storage, StorageStatistics
from tidekv.backends.storage.uri import open_storage

__all__ = ["Storage", "StorageStatistics", "open_storage"]
