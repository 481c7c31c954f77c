"""make: seeded prompts of any kind, sized in the model's tokens; load_prompts: the user's own."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from random import Random
from typing import TextIO

from learnkv.names import unknown
from learnkv.prompts.failures import SAME_TEXT
from learnkv.prompts.haystack import SPLITS, Split
from learnkv.prompts.kinds import KINDS, Build
from learnkv.prompts.prompt import Prompt, Question, Tokenizer, encode


def make(kinds: list[str], *, split: Split, count: int, num_tokens: int, tokenizer: Tokenizer, seed: int = 0) -> list[Prompt]:
    """`count` prompts, the kinds in turn, each context at most `num_tokens` tokens of `tokenizer` and close to it.

    The i-th prompt depends on (seed, split, its kind, i, num_tokens) and the tokenizer only: a longer run begins with a shorter one's.
    Raises ValueError for an unknown kind or split, or a size below 64 tokens.
    """
    return [sized(build, key, split, num_tokens, tokenizer) for build, key in seeded(kinds, split, count, num_tokens, seed)]


def drafts(kinds: list[str], *, split: Split, count: int, num_tokens: int, seed: int = 0) -> list[Prompt]:
    """The prompts of `make` with hardly a text around their facts, for whoever has no tokenizer: the same number of questions."""
    return [build(Random(key), split, DRAFT_CHARS) for build, key in seeded(kinds, split, count, num_tokens, seed)]


def seeded(kinds: list[str], split: Split, count: int, num_tokens: int, seed: int) -> list[tuple[Build, str]]:
    """(generator, seed) of each prompt."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; it is one of {', '.join(SPLITS)}")
    if num_tokens < 64:
        raise ValueError(f"num_tokens={num_tokens} leaves no room for text around the facts; give 64 or more")
    if not kinds:
        raise ValueError(f"no kinds were named; choose among {', '.join(KINDS)}")
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("prompt kind", kind, KINDS)
    turns = [kinds[i % len(kinds)] for i in range(count)]
    return [(KINDS[kind], f"{seed} {split} {SAME_TEXT.get(kind, kind)} {i} {num_tokens}") for i, kind in enumerate(turns)]


def sized(build: Build, seed: str, split: Split, num_tokens: int, tokenizer: Tokenizer) -> Prompt:
    """The prompt whose context comes close to `num_tokens` tokens from below, found by its characters."""
    num_chars, best = 4 * num_tokens, None
    for _ in range(TRIES):
        prompt = build(Random(seed), split, max(0, num_chars))
        size = len(encode(tokenizer, prompt, prompt.questions[0]).context)
        if size <= num_tokens:
            best = prompt
            if size > 0.95 * num_tokens:
                break
        num_chars += int((0.97 * num_tokens - size) * len(prompt.context) / size)
    if best is None:
        raise ValueError(f"the facts of kind {prompt.kind} need more than num_tokens={num_tokens}; the least found was {size}")
    return best


DRAFT_CHARS = 400  # room for the four pairs of `records`
TRIES = 8  # a passage ends with a sentence, so the size can't be hit at once


def load_prompts(path: str | Path) -> list[Prompt]:
    """The user's own prompts: JSONL with context, question, answer (answer_prefix optional), or plain text to continue.

    A text file becomes one prompt without a question, whose answer is its last tenth.
    Raises ValueError naming the file and line for what is missing or no JSON.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".json"):
        return [continue_text(path)]
    # not splitlines, which also breaks at characters that a JSON text may hold
    lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty; write one object with context, question, answer per line")
    return [from_record(path, number, line) for number, line in lines]


def read_text(path: Path) -> str:
    """The text of a user's file; one that can't be read or is not UTF-8 is a ValueError that names it."""
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISDIR(mode)):  # reading a folder says what it is
            raise ValueError(f"{path} is a device or socket, which may have no end; give a text file, or a pipe")
        with path.open(encoding="utf-8-sig") as file:
            return file.read() if stat.S_ISREG(mode) else read_pipe(file, str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error}); save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror}); give a text file, or .jsonl") from error


def read_pipe(pipe: TextIO, where: str) -> str:
    """All text that a pipe gives; one that gives more than a pipe should has perhaps no end, and is refused."""
    text = pipe.read(MOST_PIPED + 1)
    if len(text) > MOST_PIPED:
        raise ValueError(f"{where} gives more than {MOST_PIPED:,} characters, and may have no end; save it to a file first")
    return text


MOST_PIPED = 1 << 27  # characters


def from_record(path: Path, number: int, line: str) -> Prompt:
    """One line of a user's file as a Prompt; the answer's span is found when it occurs once."""
    # not through `datasets`, whose reader takes "2024-01-01" for a date and a path with [1] for a pattern, and names no line
    row = json_object(line, f"{path}, line {number}", "one object with context, question, answer per line")
    for key in ("context", "question", "answer"):
        text = row.get(key)
        if text is None or (key != "question" and not str(text).strip()):
            raise ValueError(f"{path}, line {number} has no {key}; every line needs the texts context, question and answer")
        if not isinstance(text, str):
            raise ValueError(f"{path}, line {number}: {key!r} is {text!r}, which is no text; write it in quotes")
    prefix = row.get("answer_prefix", "")
    if not isinstance(prefix, str):
        raise ValueError(f"{path}, line {number}: 'answer_prefix' is {prefix!r}; give a text, or leave it out")
    context, question, answer = (str(row[key]) for key in ("context", "question", "answer"))
    for key, text in {"context": context, "question": question, "answer": answer, "answer_prefix": prefix}.items():
        refuse_half_characters(text, f"{path}, line {number}: {key!r}")
    begin = context.find(answer.strip())
    span = (begin, begin + len(answer.strip())) if begin >= 0 and context.count(answer.strip()) == 1 else None
    answer = answer if answer[:1].isspace() else " " + answer
    context = context if not question or context[-1:].isspace() else context + "\n\n"
    return Prompt("user", "user", context, (Question(question, prefix, answer, span),))


def json_object(line: str, where: str, wanted: str) -> dict:
    """A line as a JSON object; one that is none is a ValueError that says where it stands and what to write."""
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}; write {wanted}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds a {type(found).__name__}; write {wanted}")
    return found


def refuse_half_characters(text: str, where: str) -> None:
    """Raises a ValueError for half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds half a character, {text[error.start]!r} at {error.start}; write it as UTF-8 text") from error


def continue_text(path: Path) -> Prompt:
    """A plain text file as a prompt whose answer is the file's last tenth, 400 characters at most."""
    text = read_text(path)
    cut = max(len(text) - max(1, min(400, len(text) // 10)), 0)
    if not text[:cut].strip() or not text[cut:].strip():
        raise ValueError(f"{path} holds {len(text)} characters; a prompt needs a context and something after it")
    return Prompt("user", "user", text[:cut], (Question("", "", text[cut:]),), chat=False)
