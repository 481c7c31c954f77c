"""What is asked of a server: sessions of one or more turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One request.

    prompt  tokens, what earlier turns said and answered included
    output  tokens of the answer, 1 or more
    think   seconds between the end of the turn before, or the session's start, and this request
    """

    prompt: int
    output: int
    think: float = 0.0


@dataclass(frozen=True, eq=False)
class Session:
    """Turns of one user; each begins with all that came before it.  Two sessions with the same turns are two.

    start  seconds
    """

    start: float
    turns: tuple[Turn, ...]

    def reused(self, turn: int) -> int:
        """Tokens of a turn's prompt that the turn before has left in the cache: its last token was never fed to the model."""
        return self.turns[turn - 1].prompt + self.turns[turn - 1].output - 1 if turn else 0


def count(sessions: Sequence[Session]) -> int:
    """Requests in all."""
    return sum(len(session.turns) for session in sessions)
