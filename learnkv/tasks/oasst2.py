"""OASST2 (arXiv:2304.07327): how likely the last answer of a conversation of many turns is; from a hub id, or a folder with oasst2.jsonl.

KVP (arXiv:2602.10238) evaluates on a selection of it that is not public, so this one is ours: of each English message tree the path of
the best ranked replies down to the last answer; paths follow each other in the order of the trees, as one conversation, until the next
does not fit.  The tokens of its last answer are scored, up to max_new_tokens of them; what is asked last is the question, all before it
the context.  A path that alone does not fit is left out; the last prompt is as long as the paths that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from learnkv.prompts import Prompt, Question
from learnkv.prompts.prompt import Tokenizer
from learnkv.tasks.hub import Row, Table, rows
from learnkv.tasks.task import SPLIT, Make, Size, Task

Turns = list[dict[str, str]]  # of a chat: role and content, a user's and an assistant's in turn

COLUMNS = ("message_id", "parent_id", "text", "role", "lang", "rank", "message_tree_id", "deleted")
TABLE = Table("OASST2", "oasst2", COLUMNS, split="validation")
HUB_ID = "OpenAssistant/oasst2"


def read(source: str) -> Make:
    return partial(conversations, source)


def conversations(source: str, size: Size, seed: int) -> Iterator[Prompt]:
    """As many paths as fit in each prompt, in the order of the trees, whatever the seed."""
    turns: Turns = []
    prompt = None
    for path in paths(rows(TABLE, source)):
        alone = prompt_of(path, size)
        if not size.fits(alone):
            continue
        longer = prompt_of(turns + path, size)
        if prompt and not size.fits(longer):
            yield prompt
            turns, longer = [], alone
        turns, prompt = turns + path, longer
    if prompt:
        yield prompt


def paths(found: Iterable[Row]) -> Iterator[Turns]:
    """The best ranked path through each English tree, down to its last answer; none of a tree without an answer."""
    replies: dict[str | None, list[Row]] = {}  # of each message; the trees' first ones are under None
    for row in found:
        if row.columns["lang"] == "en" and not row.columns["deleted"]:
            replies.setdefault(row.columns["parent_id"], []).append(row)
    for first in replies.get(None, []):
        turns = best_path(first, replies)
        if turns:
            yield turns


def best_path(row: Row, replies: dict[str | None, list[Row]]) -> Turns:
    """A message and the best ranked reply to each, down to the last answer; rank 0 is the best, a reply without a rank comes last."""
    turns: Turns = []
    asked: Turns = []
    follows: Row | None = row
    while follows:
        role = ROLES.get(follows.columns["role"])
        if role is None:
            raise ValueError(f"{follows.where} has the role {follows.columns['role']!r}; give one of {', '.join(ROLES)}")
        asked.append({"role": role, "content": follows.text("text").strip()})
        if role == "assistant":
            turns, asked = turns + asked, []
        follows = min(replies.get(follows.columns["message_id"], []), key=rank, default=None)
    return turns


def rank(row: Row) -> float:
    """Place of a reply among those to the same message."""
    found = row.columns["rank"]
    return float("inf") if found is None else found


def prompt_of(turns: Turns, size: Size) -> Prompt:
    """The conversation as the model's chat template puts it, parted before the last question and before its answer."""
    *before, asked, answered = turns
    said, begins = rendered([*before, asked], size.tokenizer)
    place = said.rfind(asked["content"], 0, len(said) - len(begins))
    if place < 0:
        raise ValueError(f"the chat template changes what a user says, {asked['content'][:40]!r}..., so oasst2 can't be cut there")
    blank = "" if size.tokenizer.chat_template else " "
    question = Question(said[place:], "", size.beginning(blank + answered["content"]))
    return Prompt("oasst2", SPLIT, said[:place], (question,), chat=False)


def rendered(turns: Turns, tokenizer: Tokenizer) -> tuple[str, str]:
    """The text up to where the assistant answers, and what it ends with to make it answer; roles in plain words without a template."""
    if not tokenizer.chat_template:
        return "".join(f"{turn['role'].capitalize()}: {turn['content']}\n\n" for turn in turns) + ASSISTANT, ASSISTANT
    done, said = (str(tokenizer.apply_chat_template(turns, add_generation_prompt=more, tokenize=False)) for more in (False, True))
    return said, said.removeprefix(done)


ASSISTANT = "Assistant:"
ROLES = {"prompter": "user", "assistant": "assistant"}
OASST2 = Task("oasst2", read(HUB_ID), None, 256, benchmark="OASST2", paper="2304.07327", chat=False, read=read)
