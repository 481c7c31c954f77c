"""Pages against a list of tokens per head: whatever is appended, dropped, cloned, reordered, nobody's tokens change but his own."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from learnkv import ops
from learnkv.runtime.pages import PAGE, PAGED, Pages, pages_for

H, D, C = 2, 3, 1
Token = tuple[int, float]  # position, and the number that its key, value and memory hold


@dataclass
class Twin:
    """Pages, and beside them what they should hold: heads[b][h] is a list of tokens."""

    pages: Pages
    heads: list[list[list[Token]]]
    seen: list[int]


def filled(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """numbers [B, H, T] -> keys and values [B, H, T, D] that hold them."""
    keys = numbers[..., None].expand(*numbers.shape, D).contiguous()
    return keys, -keys


class PagesMachine(RuleBasedStateMachine):
    """Up to four caches of one prefix, in any order of changes."""

    @initialize(rows=st.integers(1, 3), tokens=st.integers(1, 40))
    def start(self, rows, tokens):
        self.next = 1.0
        counts = pages_for(torch.full((rows, H), tokens))
        keys, values = filled(torch.zeros(rows, H, 1))
        self.twins = [Twin(Pages.empty(counts, keys, values, C), [[[] for _ in range(H)] for _ in range(rows)], [0] * rows)]
        self.append(0, [tokens] * 3)

    def twin(self, which: int) -> Twin:
        return self.twins[which % len(self.twins)]

    @rule(which=st.integers(0, 3), new=st.lists(st.integers(0, 20), min_size=3, max_size=3))
    def append(self, which, new):
        twin = self.twin(which)
        B, T = len(twin.heads), max(1, *new)
        numbers = torch.arange(self.next, self.next + B * H * T).view(B, H, T)
        self.next += B * H * T
        positions = torch.full((B, T), -1)
        for b in range(B):
            n = new[b]
            positions[b, T - n :] = torch.arange(twin.seen[b], twin.seen[b] + n)  # padding on the left
            for h in range(H):
                twin.heads[b][h] += list(zip(range(twin.seen[b], twin.seen[b] + n), numbers[b, h, T - n :].tolist(), strict=True))
            twin.seen[b] += n
        twin.pages.append(*filled(numbers), positions, padded=bool((positions < 0).any()))
        self.remember(twin)

    def remember(self, twin: Twin) -> None:
        """Memory beside every token: its number."""
        _, held = twin.pages.all_slots()
        memory = torch.zeros(*held.shape, C)
        for b, row in enumerate(twin.heads):
            for h, tokens in enumerate(row):
                memory[b, h, : len(tokens), 0] = torch.tensor([number for _, number in tokens])
        twin.pages.write_memory(twin.pages.slots().as_stored(memory), slice(0, C))

    @rule(which=st.integers(0, 3), kept=st.floats(0, 1), seed=st.integers(0, 99), spare=st.integers(0, 40))
    def evict(self, which, kept, seed, spare):
        twin = self.twin(which)
        _, held = twin.pages.all_slots()
        keep = held & (torch.rand(held.shape, generator=torch.Generator().manual_seed(seed)) < kept)
        for b, row in enumerate(twin.heads):
            for h, tokens in enumerate(row):
                row[h] = [token for slot, token in enumerate(tokens) if keep[b, h, slot]]
        twin.pages.compact(twin.pages.slots().as_stored(keep), spare)

    @rule(which=st.integers(0, 3))
    def clone(self, which):
        twin = self.twin(which)
        copy = Twin(twin.pages.clone(), [[list(tokens) for tokens in row] for row in twin.heads], list(twin.seen))
        self.twins = [*self.twins[-3:], copy]

    @rule(which=st.integers(0, 3), index=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def reorder(self, which, index):
        twin = self.twin(which)
        rows = [i % len(twin.heads) for i in index]
        twin.pages = twin.pages.rows(torch.tensor(rows))
        twin.heads = [[list(tokens) for tokens in twin.heads[b]] for b in rows]
        twin.seen = [twin.seen[b] for b in rows]

    @rule(which=st.integers(0, 3))
    def drop(self, which):
        if len(self.twins) > 1:
            del self.twins[which % len(self.twins)]

    @invariant()
    def everyone_holds_his_tokens(self):
        for twin in self.twins:
            slots = twin.pages.slots()
            for b, row in enumerate(twin.heads):
                for h, tokens in enumerate(row):
                    n = len(tokens)
                    assert int(twin.pages.lengths[b, h]) == n
                    assert slots.positions[b, h, :n].tolist() == [position for position, _ in tokens]
                    numbers = torch.tensor([number for _, number in tokens])
                    wanted = numbers[:, None].expand(n, D)
                    assert torch.equal(slots.keys[b, h, :n], wanted) and torch.equal(slots.values[b, h, :n], -wanted)
                    assert torch.equal(slots.gathered(slots.memory_pages)[b, h, :n, 0], numbers)

    @invariant()
    def used_and_free_pages_add_up_and_none_stands_twice_unless_shared(self):
        for pool in {id(twin.pages.pool): twin.pages.pool for twin in self.twins}.values():
            tables = torch.cat([twin.pages.table.flatten() for twin in self.twins if twin.pages.pool is pool])
            used = tables[tables >= 0]
            assert torch.equal(pool.uses(), torch.bincount(used, minlength=len(pool.keys)))
            assert len({len(getattr(pool, name)) for name in PAGED}) == 1
            assert pool.shared or len(used.unique()) == len(used)

    @invariant()
    def equal_runs_are_what_the_pages_hold(self):
        for twin in self.twins:
            run, slots = twin.pages.equal_run(), twin.pages.slots()
            assert run is None or all(torch.equal(slots.in_order(x), y) for x, y in zip(run, (slots.keys, slots.values), strict=True))

    @invariant()
    def owners_that_were_kept_are_what_the_table_says(self):
        for twin in self.twins:
            kept, asked = twin.pages.owners(), ops.owners(twin.pages.table, twin.pages.pool.positions)
            assert (kept is None) == (asked is None)
            assert kept is None or (torch.equal(kept.slots, asked.slots) and kept.full == asked.full)


PagesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestPages = PagesMachine.TestCase


def prefix(tokens: int) -> Pages:
    keys, values = filled(torch.arange(float(H * tokens)).view(1, H, tokens))
    pages = Pages.empty(pages_for(torch.full((1, H), tokens)), keys, values, 0)
    pages.append(keys, values, torch.arange(tokens)[None])
    return pages


def test_a_question_to_a_clone_copies_the_last_page_of_each_head_and_no_more():
    pages = prefix(10 * PAGE + 5)
    clones = [pages.clone() for _ in range(3)]
    for clone in clones:
        clone.append(*filled(torch.ones(1, H, 2)), torch.tensor([[165, 166]]))
    assert int((pages.pool.uses() > 0).sum()) == H * (11 + 3)


def test_pages_of_a_clone_that_is_gone_are_used_again():
    pages = prefix(PAGE + 1)
    for _ in range(50):
        clone = pages.clone()
        clone.append(*filled(torch.ones(1, H, 40)), torch.arange(17, 57)[None])
        del clone
    assert len(pages.pool.keys) <= 2 * H * 5


@pytest.mark.parametrize("keep", [0, 1, PAGE, PAGE + 1])
def test_pages_that_hold_nothing_are_given_back(keep):
    pages = prefix(50 * PAGE)
    slots, _ = pages.all_slots()
    pages.compact(slots < keep, spare=1)
    assert len(pages.pool.keys) == H * -(-(keep + 1) // PAGE)
