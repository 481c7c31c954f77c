"""The kinds of prompts: facts hidden in text and asked for afterwards, chains, records, and plain continuation.

Every sentence here is our own.  TRAIN_KINDS make training traces; HELDOUT_KINDS are never trained on and choose no setting;
IDENTIFIER_KINDS are needles graded by length, which the bundled model itself often cannot repeat; FAILURE_KINDS what eviction breaks first.
"""

from __future__ import annotations

from random import Random

from learnkv.prompts import pools
from learnkv.prompts.facts import Build, Fact, Placed, distinct, facts, hide, hide_in_order, listed, mixture, several, shuffled
from learnkv.prompts.failures import FAILURE_KINDS
from learnkv.prompts.haystack import Split, Style, passage
from learnkv.prompts.prompt import Prompt, Question


def chain(rng: Random, split: Split, num_chars: int) -> Prompt:
    """A variable set to a number and handed on once or twice; asked for the number that the last one holds."""
    first, *rest = (pools.variable(rng, split) for _ in range(rng.choice((2, 3))))
    value = pools.number(10000, 99999)(rng, split)
    lines = [f"The program sets {first} to {value}."]
    for source, target in zip([first, *rest], rest, strict=False):
        lines.append(f"The program then copies {source} into {target}.")
    context = hide_in_order(rng, split, num_chars, lines)
    asked = [Placed(lines[0], f"Which number does the program put into {v}?", f"The number in {v} is", value) for v in (first, *rest)]
    return Prompt("chain", split, context, tuple(p.ask(context) for p in asked))


def many_values(rng: Random, split: Split, num_chars: int) -> Prompt:
    """One key with two or three values in different places; asked for all of them in order."""
    key = pools.word(rng, split)
    values = [pools.number(100, 9999)(rng, split) for _ in range(rng.choice((2, 3)))]
    context = hide_in_order(rng, split, num_chars, [f"One of the measurements of {key} was {v}." for v in values])
    answer = ", ".join(values)
    question = Question(f"What were the measurements of {key}, in the order of the text?", f"The measurements of {key} were", " " + answer)
    return Prompt("many_values", split, context, (question,))


def many_keys(rng: Random, split: Split, num_chars: int) -> Prompt:
    """Several keys with a value each; asked for two of them in one answer."""
    placed = distinct(rng, split, [CODES[0]] * 4)
    context = hide(rng, split, num_chars, [p.sentence for p in placed])
    one, two = shuffled(rng, placed)[:2]
    keys = [p.prefix.removeprefix("The secret code given to ").removesuffix(" reads") for p in (one, two)]
    question = Question(
        f"Which secret codes were given to {keys[0]} and {keys[1]}?",
        f"The codes of {keys[0]} and {keys[1]} are",
        f" {one.answer} and {two.answer}",
    )
    return Prompt("many_keys", split, context, (question,))


def records(rng: Random, split: Split, num_chars: int) -> Prompt:
    """A flat JSON object that fills the context; asked for four of its values."""
    intro = "Here is a JSON object with the settings of a program.\n{\n"
    lines: list[str] = []
    pairs: list[tuple[str, str]] = []
    while sum(map(len, lines)) + len(lines) < num_chars - len(intro):
        key, value = pools.pair(pools.word, "_", pools.word)(rng, split), pools.number(10000, 99999)(rng, split)
        pairs.append((key, value))
        lines.append(f'  "{key}": {value},')
    context = intro + "\n".join(lines) + "\n}\n"
    asked = rng.sample(pairs, min(4, len(pairs)))
    placed = [Placed(f'"{k}": {v}', f'Which value does "{k}" have in the JSON object?', f'The value of "{k}" is', v) for k, v in asked]
    return Prompt("records", split, context, tuple(p.ask(context) for p in placed))


def continuation(kind: str, style: Style) -> Build:
    """Plain text to go on with: the question is empty and the answer is how the text continues."""

    def build(rng: Random, split: Split, num_chars: int) -> Prompt:
        glue = "\n" if style == "code" else " "
        text = glue.join(passage(rng, style, split, num_chars + 400))
        cut = text.index(glue, min(num_chars, len(text) - 200))
        return Prompt(kind, split, text[:cut], (Question("", "", text[cut : cut + 300]),), chat=False)

    return build


def roll_call(rng: Random, split: Split, num_chars: int) -> Prompt:
    """Lists of three names; asked for one list in order."""
    placed = []
    for ship in sorted(several(pools.ship, 2, rng, split)):
        answer = listed(several(pools.name, 3, rng, split))
        placed.append(Placed(f"On board the {ship} were {answer}.", f"Who was on board the {ship}?", f"On board the {ship} were", answer))
    context = hide(rng, split, num_chars, [p.sentence for p in placed])
    return Prompt("roll_call", split, context, tuple(p.ask(context) for p in shuffled(rng, placed)))


def shopping(rng: Random, split: Split, num_chars: int) -> Prompt:
    """A shopping list of three goods; asked for it in order."""
    who = pools.name(rng, split)
    answer = listed(several(pools.food, 3, rng, split))
    fact = Placed(f"Before noon {who} has to buy {answer}.", f"What does {who} have to buy?", f"Before noon {who} has to buy", answer)
    context = hide(rng, split, num_chars, [fact.sentence])
    return Prompt("shopping", split, context, (fact.ask(context),))


CODES = (
    Fact(
        "The secret code given to {key} reads {value}.",
        "Which secret code was given to {key}?",
        "The secret code given to {key} reads",
        pools.word,
        pools.number(1000000, 9999999),
    ),
    Fact(
        "Note that the locker of {key} opens with {value}.",
        "With which number does the locker of {key} open?",
        "The locker of {key} opens with",
        pools.name,
        pools.number(1000, 999999),
    ),
    Fact(
        "The serial number stamped on the {key} is {value}.",
        "Which serial number is stamped on the {key}?",
        "The serial number stamped on the {key} is",
        pools.item,
        pools.number(10000, 99999999),
    ),
)
WORDS = (
    Fact("The password for {key} is {value}.", "What is the password for {key}?", "The password for {key} is", pools.word, pools.word),
    Fact(
        "Agents call the {key} by the name {value}.",
        "By which name do agents call the {key}?",
        "Agents call the {key} by the name",
        pools.item,
        pools.ship,
    ),
    Fact(
        "In this text {key} stands for {value}.",
        "What does {key} stand for in the text?",
        "In this text {key} stands for",
        pools.variable,
        pools.word,
    ),
)
PEOPLE = (
    Fact("{key} works as a {value}.", "What is the job of {key}?", "{key} works as a", pools.name, pools.job),
    Fact(
        "The favorite fruit of {key} is the {value}.",
        "Which fruit is the favorite of {key}?",
        "The favorite fruit of {key} is the",
        pools.name,
        pools.fruit,
    ),
    Fact(
        "Last week {key} bought a {value} bicycle.",
        "What color is the bicycle that {key} bought?",
        "The bicycle that {key} bought is",
        pools.name,
        pools.colour,
    ),
    Fact("{key} keeps a {value} at home.", "Which animal does {key} keep at home?", "At home {key} keeps a", pools.name, pools.animal),
    Fact(
        "Every evening {key} plays the {value}.",
        "Which instrument does {key} play?",
        "Every evening {key} plays the",
        pools.name,
        pools.instrument,
    ),
    Fact(
        "{key} is learning to speak {value}.", "Which language is {key} learning?", "{key} is learning to speak", pools.name, pools.language
    ),
)
THINGS = (
    Fact(
        "The {key} in the hall is made of {value}.",
        "What is the {key} in the hall made of?",
        "The {key} in the hall is made of",
        pools.item,
        pools.metal,
    ),
    Fact(
        "The {key} was painted {value} by hand.", "In which color was the {key} painted?", "The {key} was painted", pools.item, pools.colour
    ),
    Fact("The owner of the {key} is {value}.", "Who is the owner of the {key}?", "The owner of the {key} is", pools.item, pools.name),
    Fact(
        "The page about {key} was written by {value}.",
        "Who wrote the page about {key}?",
        "The page about {key} was written by",
        pools.word,
        pools.name,
    ),
)
SETTINGS = (
    Fact("{key} = {value}.", "What is the value of {key}?", "{key} =", pools.variable, pools.number(10000, 99999)),
    Fact(
        "The option --{key} defaults to {value}.",
        "What does the option --{key} default to?",
        "The option --{key} defaults to",
        pools.word,
        pools.number(10, 9999),
    ),
    Fact(
        "Set {key} to {value} before the program starts.",
        "To what is {key} set before the program starts?",
        "{key} is set to",
        pools.variable,
        pools.pair(pools.word, "_", pools.word),
    ),
)

CITIES = (
    Fact(
        "{key} moved to the city of {value} last summer.",
        "Which city did {key} move to?",
        "{key} moved to the city of",
        pools.name,
        pools.city,
    ),
)
PRICES = (
    Fact(
        "At the market a {key} costs {value} dollars.",
        "How many dollars does a {key} cost at the market?",
        "At the market a {key} costs",
        pools.item,
        pools.number(12, 985),
    ),
)
DATES = (Fact("The {key} was held on {value}.", "On which day was the {key} held?", "The {key} was held on", pools.event, pools.date),)
ROOMS = (
    Fact(
        "The meeting about the {key} takes place in room {value}.",
        "In which room does the meeting about the {key} take place?",
        "The meeting about the {key} takes place in room",
        pools.event,
        pools.number(100, 899),
    ),
)
CARGO = (
    Fact(
        "The {key} sailed with a load of {value}.",
        "With which load did the {key} sail?",
        "The {key} sailed with a load of",
        pools.ship,
        pools.food,
    ),
)


def access_token(length: int) -> Fact:
    """A random identifier of `length` characters: nothing around it looks like it."""
    return Fact(
        "The access token of {key} is {value}.",
        "What is the access token of {key}?",
        "The access token of {key} is",
        pools.word,
        pools.identifier(length),
    )


TRAIN_KINDS: dict[str, Build] = {
    "codes": facts("codes", CODES, (1, 2, 4)),
    "passwords": facts("passwords", WORDS, (1, 2, 3)),
    "people": facts("people", PEOPLE, (2, 3)),
    "things": facts("things", THINGS, (2, 3)),
    "settings": facts("settings", SETTINGS, (2, 4)),
    "mixture": mixture("mixture", CODES + WORDS + PEOPLE + THINGS + SETTINGS, (4, 6, 8)),
    "chain": chain,
    "many_values": many_values,
    "many_keys": many_keys,
    "records": records,
    "prose": continuation("prose", "prose"),
    "code": continuation("code", "code"),
}
HELDOUT_KINDS: dict[str, Build] = {
    "cities": facts("cities", CITIES, (3,)),
    "prices": facts("prices", PRICES, (3,)),
    "dates": facts("dates", DATES, (2,)),
    "rooms": facts("rooms", ROOMS, (3,)),
    "cargo": facts("cargo", CARGO, (3,)),
    "roll_call": roll_call,
    "shopping": shopping,
}
IDENTIFIER_KINDS: dict[str, Build] = {
    f"tokens_{length}": facts(f"tokens_{length}", (access_token(length),), (1,)) for length in (6, 12, 24, 36)
}
KINDS: dict[str, Build] = TRAIN_KINDS | HELDOUT_KINDS | IDENTIFIER_KINDS | FAILURE_KINDS
