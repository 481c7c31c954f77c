"""Kinds of prompts on which eviction fails first: for comparisons alone, none is ever trained on.

Answers that look like nothing around them, long exact numbers, two facts that only help together, an instruction at the start that
decides the end, and an agent's rule and tools under many turns of tool outputs.
"""

from __future__ import annotations

from random import Random

from learnkv.prompts import pools
from learnkv.prompts.facts import Build, Fact, Placed, distinct, facts, hide, several, shuffled
from learnkv.prompts.haystack import Split, passage
from learnkv.prompts.pools import Pool
from learnkv.prompts.prompt import Prompt, Question

TURN_CHARS = 300  # of a tool's output
RETURNED = pools.number(10000, 999999)
PINNED = "agent_synth_pinned"


def labelled(what: str, value: Pool) -> Fact:
    """A value under a name, as logs and ledgers have it."""
    key = f"{what} of {{key}} is"
    return Fact(f"The {key} {{value}}.", f"What is the {what} of {{key}}?", f"The {key}", pools.word, value)


IDENTIFIERS = (labelled("serial", pools.serial), labelled("checksum", pools.digest), labelled("upload key", pools.identifier(10)))
UUIDS = (labelled("request id", pools.uuid), labelled("session id", pools.uuid))


def account(length: int) -> Fact:
    """A number of exactly `length` digits."""
    return labelled("account number", pools.number(10 ** (length - 1), 10**length - 1))


# ---- two hops

HOPS = (
    (
        Fact("The parcel for {key} lies in the {value}.", "", "", pools.name, pools.item),
        Fact("The {key} opens with the number {value}.", "", "", pools.item, pools.number(10000, 999999)),
        "With which number can the parcel for {start} be reached?",
        "The parcel for {start} can be reached with the number",
    ),
    (
        Fact("The {key} sails to {value}.", "", "", pools.ship, pools.city),
        Fact("The harbour of {key} is run by {value}.", "", "", pools.city, pools.name),
        "Who runs the harbour that the {start} sails to?",
        "The harbour that the {start} sails to is run by",
    ),
)


def two_hops(rng: Random, split: Split, num_chars: int) -> Prompt:
    """Three pairs of facts of one form; asked for what the second of a pair says, by what the first one is about."""
    first, second, question, prefix = rng.choice(HOPS)
    starts, middles, ends = (several(pool, 3, rng, split) for pool in (first.key, first.value, second.value))
    opening = [first.statement.format(key=key, value=value) for key, value in zip(starts, middles, strict=True)]
    placed = [
        Placed(second.statement.format(key=middle, value=end), question.format(start=start), prefix.format(start=start), end)
        for start, middle, end in zip(starts, middles, ends, strict=True)
    ]
    context = hide(rng, split, num_chars, [*opening, *(p.sentence for p in placed)])
    return Prompt("two_hops", split, context, tuple(p.ask(context) for p in shuffled(rng, placed)))


# ---- an instruction at the start

ORDERS = (
    ("Begin every answer with the word {word}, and give the number after it.", "{word} {value}"),
    ("End every answer with the word {word}, right after the number.", "{value} {word}"),
)


def instruction(rng: Random, split: Split, num_chars: int) -> Prompt:
    """A form that every answer must have, said first of all; asked for two numbers at the end, where it is not said again."""
    order, form = rng.choice(ORDERS)
    word = pools.word(rng, split)
    placed = distinct(rng, split, [labelled("reading", pools.number(1000, 999999))] * 2)
    head = order.format(word=word) + "\n"
    context = head + hide(rng, split, max(0, num_chars - len(head)), [p.sentence for p in placed])
    asked = tuple(Question(p.question, "The answer is", " " + form.format(word=word, value=p.answer)) for p in placed)
    return Prompt("instruction", split, context, asked)


# ---- an agent


def agent(pinned: bool) -> Build:
    """A transcript of an agent: a rule and the schema of three tools in turn 1, a tool's output in each turn after it.

    At the turn after the last it is asked by whom a call must be signed, for an argument of a tool, and for what a tool returned.
    Pinned, no method may evict the first turn.  It is one text, not a chat of many turns: templates say a system prompt and tools in their
    own ways, and some not at all.
    """

    def build(rng: Random, split: Split, num_chars: int) -> Prompt:
        tools, arguments = several(pools.word, 3, rng, split), several(pools.variable, 3, rng, split)
        signer = pools.name(rng, split)
        schema = [f'{{"tool": "{tool}", "argument": "{argument}"}}' for tool, argument in zip(tools, arguments, strict=True)]
        rule = f"Sign every call with the name {signer}."
        head = "\n".join(["Turn 1. You are an agent and may call these tools, one in a turn:", *schema, rule]) + "\n"
        returned = turns(rng, split, tools, num_chars - len(head))
        context = head + "\n".join(turn.sentence for turn in returned) + "\n"
        now = f"Turn {len(returned) + 2}. "
        probes = [
            Placed(rule, f"{now}Which name must the next call be signed with?", "The next call must be signed with the name", signer),
            Placed(
                schema[0], f"{now}Which argument does the tool {tools[0]} take?", f"The tool {tools[0]} takes the argument", arguments[0]
            ),
            rng.choice(returned),
        ]
        pins = ((0, len(head)),) if pinned else ()
        return Prompt(PINNED if pinned else "agent_synth", split, context, tuple(p.ask(context) for p in shuffled(rng, probes)), pins=pins)

    return build


def turns(rng: Random, split: Split, tools: list[str], num_chars: int) -> list[Placed]:
    """Turns of about `num_chars` characters in all, at least two: each the output of a tool, and the question what it returned."""
    made: list[Placed] = []
    while len(made) < 2 or num_chars - sum(len(turn.sentence) + 1 for turn in made) > TURN_CHARS / 2:
        room = num_chars - sum(len(turn.sentence) + 1 for turn in made)
        number, value = len(made) + 2, RETURNED(rng, split)
        text = " ".join(passage(rng, "docstrings", split, max(0, min(TURN_CHARS, room - 100))))
        sentence = f"Turn {number}. The agent calls {rng.choice(tools)}. {text} It returned {value}."
        made.append(Placed(sentence, f"What did the tool return in turn {number}?", f"In turn {number} the tool returned", value))
    return made


FAILURE_KINDS: dict[str, Build] = {
    "identifiers": facts("identifiers", IDENTIFIERS, (3,)),
    "uuids": facts("uuids", UUIDS, (2,)),
    "digits_12": facts("digits_12", (account(12),), (2,)),
    "digits_20": facts("digits_20", (account(20),), (2,)),
    "two_hops": two_hops,
    "instruction": instruction,
    "agent_synth": agent(pinned=False),
    PINNED: agent(pinned=True),
}
SAME_TEXT = {PINNED: "agent_synth"}  # a kind whose prompts are another's but for their pins, so that the two can be compared
