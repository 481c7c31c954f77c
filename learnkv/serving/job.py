"""A request on its way through the server."""

from __future__ import annotations

from dataclasses import dataclass, field

from learnkv.serving.requests import Session


@dataclass(eq=False, slots=True)
class Job:
    """Where one request stands; lengths are tokens, times seconds, pages of one KV head each.

    number     order of arrival
    budget     tokens per KV head that stay once it is evicted from
    target     tokens to be prefilled before the next token comes: the prompt, or all that was said before a preemption
    seen       tokens that went through the model, evicted ones included
    resident   tokens that an evictable layer's head holds
    since      decode steps since the last eviction
    generated  tokens of the answer so far
    pages      held
    swapped    whether its pages lie on the host
    touched    when it last got a token, in turns of the server
    lost       tokens that preemptions made it compute again
    """

    number: int
    session: Session
    turn: int
    arrived: float
    budget: int
    target: int
    prompt: int
    output: int
    seen: int = 0
    resident: int = 0
    since: int = 0
    generated: int = 0
    pages: int = 0
    swapped: bool = False
    touched: int = 0
    preemptions: int = 0
    lost: int = 0
    reused: int = 0
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    chunk: int = field(default=0)  # of the step that runs

    @property
    def prefilling(self) -> bool:
        return self.seen < self.target

    @property
    def last_turn(self) -> bool:
        return self.turn + 1 == len(self.session.turns)
