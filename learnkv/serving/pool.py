"""The page pool: who holds how many pages, exactly."""

from __future__ import annotations

from collections.abc import Hashable


class PagePool:
    """Pages of 16 tokens of one KV head.  What is free and what is held is always what there is.

    size  pages
    """

    def __init__(self, size: int) -> None:
        self.size = self.free = size
        self.held: dict[Hashable, int] = {}
        self.peak = 0

    def hold(self, owner: Hashable, pages: int) -> None:
        """Makes `owner` hold so many pages, more or fewer than before; who asks has seen to it that they are there."""
        self.free -= pages - self.held.get(owner, 0)
        assert self.free >= 0, f"{owner} takes {pages} pages, {-self.free} more than are free"
        self.held[owner] = pages
        self.peak = max(self.peak, self.size - self.free)

    def release(self, owner: Hashable) -> int:
        """Frees what `owner` holds, and says how many pages that were."""
        pages = self.held.pop(owner, 0)
        self.free += pages
        return pages

    def rename(self, owner: Hashable, to: Hashable) -> None:
        """Hands pages over."""
        assert to not in self.held
        self.held[to] = self.held.pop(owner)

    @property
    def used(self) -> int:
        """Pages that are held."""
        return self.size - self.free

    def check(self) -> None:
        """Raises an AssertionError where a page was lost or made."""
        assert all(pages >= 0 for pages in self.held.values())
        assert self.free + sum(self.held.values()) == self.size, f"{self.free} free and {sum(self.held.values())} held of {self.size}"
