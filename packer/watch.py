"""Progress under the name that packer's modules import; see `cache.progress`."""

from cache.progress import Counter, Silent, Watcher

__all__ = ["Counter", "Silent", "Watcher"]
