"""A continuous batcher over a page pool: each step decodes one token of every running request and fills up with prefill chunks.

As vLLM's, but for: pages of a whole prefill are reserved when a request is admitted (vLLM takes them chunk by chunk); pages are of one KV
head, so that an evicted request gives its pages back at once; prefixes are shared between turns of a session only; a preempted request
may be swapped to a host without limit; no watermark, and no step begins before the last one has ended.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Literal

from learnkv.serving.caches import PAGE, CacheModel
from learnkv.serving.cost import Work
from learnkv.serving.job import Job
from learnkv.serving.pool import PagePool
from learnkv.serving.requests import Session
from learnkv.serving.shapes import Shape
from learnkv.serving.victims import VICTIMS, Victim


@dataclass(frozen=True)
class Limits:
    """A server's own.

    pages        of the pool
    step_tokens  of one step at most, decoded ones included
    batch        requests that run at once, at most
    victim       who is preempted
    refill       recompute, or swap to the host
    """

    pages: int
    step_tokens: int = 2048
    batch: int = 256
    victim: Victim = "newest"
    refill: Literal["recompute", "swap"] = "recompute"


@dataclass
class Counts:
    """What happened; tokens, and pages of one KV head."""

    steps: int = 0
    prefilled: int = 0
    decoded: int = 0
    reused: int = 0
    recomputed: int = 0
    preemptions: int = 0
    dropped: int = 0  # sessions whose pages went before their next turn
    pages_out: int = 0
    pages_in: int = 0
    running: int = 0  # summed over steps


@dataclass(frozen=True)
class Kept:
    """What a session left for its next turn."""

    seen: int
    resident: int


@dataclass
class Batcher:
    """The server's bookkeeping; it knows no time but that which its caller gives."""

    shape: Shape
    cache: CacheModel
    limits: Limits
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    kept: OrderedDict[Session, Kept] = field(default_factory=OrderedDict)  # least recently used first
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.limits.pages)
        self.turns = 0
        self.heads, self.side = self.shape.heads, self.shape.sliding * self.shape.kv_heads

    # ---- pages

    def pages(self, resident: int, seen: int) -> int:
        """Of one request over all KV heads."""
        pages = self.heads * -(-resident // PAGE)
        return pages + self.side * -(-min(seen, self.shape.window) // PAGE) if self.side else pages

    def prefill_pages(self, job: Job) -> int:
        """The most that is held until `target` is reached: a chunk beside the budget."""
        left = job.target - job.seen
        most = min(job.resident + left, max(job.resident, job.budget) + self.limits.step_tokens)
        return self.pages(most, job.target)

    def most_pages(self, job: Job) -> int:
        """The most that a request may come to hold on its own, preempted or not."""
        total = job.prompt + job.output
        return self.pages(min(total, job.budget + self.cache.interval + self.limits.step_tokens), total)

    def fits(self, job: Job) -> bool:
        """Whether it can be served at all."""
        return self.most_pages(job) <= self.pool.size

    # ---- a step

    def plan(self, now: float) -> Work:
        """What the next step does, its pages taken."""
        work = Work(steps=1)
        preempted = self.make_room(work)
        room = self.limits.step_tokens
        for job in self.running:
            if job.seen >= job.target:
                room -= 1
        for job in self.running:
            if job.seen < job.target:
                room -= self.give_chunk(job, room)
        while not preempted and room > 0 and self.waiting and len(self.running) < self.limits.batch:
            if not self.admit(self.waiting[0], now, work):
                break
            job = self.running[-1]
            room -= self.give_chunk(job, room) if job.prefilling else 1
        self.add_up(work)
        return work

    def make_room(self, work: Work) -> bool:
        """Takes the pages into which decoding requests grow; whether someone had to go for that."""
        preempted = False
        while True:
            grown = [(job, pages) for job in self.running if job.seen >= job.target and (pages := self.grown(job)) != job.pages]
            short = sum(pages - job.pages for job, pages in grown) - self.pool.free
            if short <= 0:
                break
            if not self.drop_kept():
                self.preempt(VICTIMS[self.limits.victim](self.running), work)
                preempted = True
        for job, pages in grown:
            self.hold(job, pages)
        return preempted

    def grown(self, job: Job) -> int:
        return self.pages(job.resident + 1, job.seen + 1)

    def hold(self, job: Job, pages: int) -> None:
        self.pool.hold(job, pages)
        job.pages = pages

    def give_chunk(self, job: Job, room: int) -> int:
        """Tokens of the job's prefill that this step takes."""
        job.chunk = min(job.target - job.seen, max(room, 0))
        return job.chunk

    def add_up(self, work: Work) -> None:
        """The sums over running requests that the step's time hangs on."""
        heads, side = self.heads, self.side
        for job in self.running:
            if job.seen >= job.target:
                work.tokens += 1
                work.rows += 1
                work.decode_slots += self.shape.slots(job.resident + 1, job.seen + 1) if side else heads * (job.resident + 1)
            elif job.chunk:
                self.add_chunk(job, work)
        work.new_slots = work.tokens * (heads + side)

    def add_chunk(self, job: Job, work: Work) -> None:
        chunk, window = job.chunk, self.shape.window
        work.tokens += chunk
        work.prefilled += chunk
        work.rows += job.seen + chunk == job.target
        work.prefill_slots += self.heads * (chunk * job.resident + chunk * (chunk + 1) // 2)
        work.prefill_slots += self.side * (capped(job.seen + chunk, window) - capped(job.seen, window))
        work.earlier_slots += self.heads * job.resident + self.side * min(job.seen, window)

    def finish_step(self, now: float) -> list[Job]:
        """Counts what the step has done, evicts, and says which requests are through."""
        self.counts.steps += 1
        self.counts.running += len(self.running)
        turn = self.turns
        for job in self.running:
            if job.seen >= job.target:
                self.decoded(job)
            elif job.chunk:
                self.prefilled(job, now)
            else:
                continue
            turn += 1
            job.touched = turn
        self.turns = turn
        done = [job for job in self.running if job.generated == job.output]
        for job in done:
            self.leave(job, now)
        if done:
            self.running = [job for job in self.running if job.generated < job.output]
        return done

    def decoded(self, job: Job) -> None:
        self.counts.decoded += 1
        job.seen += 1
        job.target = job.seen
        job.resident += 1
        job.since += 1
        job.generated += 1
        if job.resident > job.budget and job.since >= self.cache.interval:
            self.shrink(job)

    def shrink(self, job: Job) -> None:
        """Evicts to the budget."""
        job.resident, job.since = min(job.resident, job.budget), 0
        pages = self.pages(job.resident, job.seen)
        if pages != job.pages:
            self.hold(job, pages)

    def prefilled(self, job: Job, now: float) -> None:
        self.counts.prefilled += job.chunk
        job.seen += job.chunk
        job.resident = min(job.resident + job.chunk, job.budget)
        job.chunk = 0
        if job.seen == job.target:
            job.generated += 1
            job.first_token = now if job.first_token is None else job.first_token
            self.shrink(job)

    # ---- coming and going

    def admit(self, job: Job, now: float, work: Work) -> bool:
        """Lets the first of those who wait run, if its pages are free or can be freed of sessions that pause."""
        own = self.kept.get(job.session) if not job.seen and not job.swapped else None
        if own:
            job.seen, job.resident = own.seen, own.resident
        need = self.prefill_pages(job) if job.prefilling else self.grown(job)
        held = self.pool.held[job.session] if own else 0
        while need - held > self.pool.free and self.drop_kept(job.session):
            pass
        if need - held > self.pool.free:
            if own:
                job.seen = job.resident = 0
                if not self.running:  # its own prefix is all that stands in its way
                    self.drop(job.session)
                    return self.admit(job, now, work)
            return False
        self.waiting.popleft()
        self.enter(job, own, now, work)
        self.hold(job, need)
        return True

    def enter(self, job: Job, own: Kept | None, now: float, work: Work) -> None:
        """Takes over what lies on the card or on the host."""
        if own:
            del self.kept[job.session]
            self.pool.rename(job.session, job)
            job.reused = own.seen
            self.counts.reused += own.seen
        if job.swapped:
            pages = self.pages(job.resident, job.seen)
            self.counts.pages_in += pages
            work.swapped += pages * self.cache.page
            job.swapped = False
        job.admitted = now if job.admitted is None else job.admitted
        job.touched = self.turns
        self.running.append(job)

    def preempt(self, job: Job, work: Work) -> None:
        """Frees a running request's pages and puts it before all who wait."""
        self.running.remove(job)
        self.waiting.appendleft(job)
        self.pool.release(job)
        self.counts.preemptions += 1
        job.preemptions += 1
        job.pages = job.chunk = 0
        if self.limits.refill == "swap":
            pages = self.pages(job.resident, job.seen)
            self.counts.pages_out += pages
            work.swapped += pages * self.cache.page
            job.swapped = True
        else:
            self.counts.recomputed += job.seen
            job.lost += job.seen
            job.seen = job.resident = job.since = 0
            job.target = job.prompt + job.generated

    def leave(self, job: Job, now: float) -> None:
        """A request is through; what it holds stays for the session's next turn, if there is one."""
        job.finished = now
        if job.last_turn:
            self.pool.release(job)
        else:
            self.pool.rename(job, job.session)
            self.kept[job.session] = Kept(job.seen, job.resident)
        job.pages = 0

    def drop_kept(self, but: Session | None = None) -> bool:
        """Frees the pages of the session that paused longest; False where none pauses."""
        found = next((session for session in self.kept if session is not but), None)
        if found is None:
            return False
        self.drop(found)
        return True

    def drop(self, session: Session) -> None:
        self.forget(session)
        self.counts.dropped += 1

    def forget(self, session: Session) -> None:
        """Frees what a session left, if it left anything."""
        if self.kept.pop(session, None):
            self.pool.release(session)


def capped(tokens: int, window: int) -> int:
    """Slots that `tokens` in a row attend to where each sees a window at most: the sum of min(i, window) over 1 to tokens."""
    inside = min(tokens, window)
    return inside * (inside + 1) // 2 + (tokens - inside) * window
