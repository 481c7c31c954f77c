"""Keys and values that facts are made of; a pool's entries are divided among the splits, so none is ever shared."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from random import Random
from string import ascii_lowercase, ascii_uppercase, digits
from uuid import UUID

from learnkv.prompts.haystack import Split, split_of, words

Pool = Callable[[Random, Split], str]


def one_of(*lists: str) -> Pool:
    """A pool of the blank-separated entries of `lists`."""
    return from_list(sorted({entry for text in lists for entry in text.split()}))


def from_list(entries: list[str]) -> Pool:
    """A pool of the given entries: half of them train, a quarter dev, a quarter heldout, in the order of their sha256."""
    shuffled = sorted(entries, key=lambda entry: sha256(entry.encode()).hexdigest())
    quarter = len(entries) // 4
    sides = {"dev": shuffled[:quarter], "heldout": shuffled[quarter : 2 * quarter], "train": shuffled[2 * quarter :]}
    return lambda rng, split: rng.choice(sides[split])


def until_in_split(draw: Callable[[Random], str]) -> Pool:
    """A pool without a list: draws until the value's own hash puts it on the wanted side."""

    def pool(rng: Random, split: Split) -> str:
        while split_of(value := draw(rng)) != split:
            pass
        return value

    return pool


def number(low: int, high: int) -> Pool:
    """Whole numbers from `low` to `high`."""
    return until_in_split(lambda rng: str(rng.randint(low, high)))


def identifier(length: int) -> Pool:
    """Random lower-case letters and digits."""
    return until_in_split(lambda rng: "".join(rng.choices(ascii_lowercase + digits, k=length)))


uuid = until_in_split(lambda rng: str(UUID(int=rng.getrandbits(128), version=4)))
serial = until_in_split(
    lambda rng: "-".join(["".join(rng.choices(ascii_uppercase, k=2)), "".join(rng.choices(digits, k=4)), rng.choice(ascii_uppercase)])
)
digest = until_in_split(lambda rng: f"{rng.getrandbits(64):016x}")


@cache
def prose_words() -> Pool:
    """The pool behind `word`; built at first use, since it reads all of the prose."""
    return from_list(words())


def word(rng: Random, split: Split) -> str:
    """A word that the prose uses."""
    return prose_words()(rng, split)


def variable(rng: Random, split: Split) -> str:
    """An upper-case name with a digit, as in ALPHA7."""
    return word(rng, split).upper() + str(rng.randint(1, 9))


def pair(first: Pool, glue: str, second: Pool) -> Pool:
    """Two entries in one, as in alpha_beta."""
    return lambda rng, split: first(rng, split) + glue + second(rng, split)


name = one_of(
    "Ivan Julia Karl Lena Marco Nina Oscar Paula Quentin Rosa Simon Tanya Alice Boris Clara Dmitri Elena Farid Greta Hiro Ingrid Jonas",
    "Kavita Leo Mona Nadia Olaf Petra Rafael Sofia Tomas Ursula Viktor Wanda Yusuf Zoe Amir Bella Carlos Diana Emil Fatima Gustav Hanna",
    "Igor Jana Kofi Lucia Mateo Naomi Omar Priya Ravi Selma Theo Uma Vera Walter Xenia Yara Anton Bruno Celia Doris Edgar Flora Gavin",
)
job = one_of(
    "plumber teacher nurse pilot baker lawyer painter farmer sailor tailor dentist barber butcher carpenter florist gardener",
    "judge librarian mechanic miner optician pharmacist potter printer surgeon welder waiter translator chemist cashier",
)
fruit = one_of(
    "apple mango banana cherry grape lemon melon peach plum orange papaya pear apricot fig kiwi lime coconut olive quince date",
    "pineapple raspberry strawberry blueberry pomegranate tangerine",
)
colour = one_of("red blue green yellow purple orange brown black white pink grey silver golden crimson turquoise violet beige maroon")
animal = one_of(
    "dog cat rabbit parrot hamster turtle goat pony ferret lizard snake canary duck goose donkey sheep pigeon spider frog",
    "hedgehog squirrel owl falcon rat crow",
)
instrument = one_of(
    "piano violin cello flute trumpet guitar drum harp clarinet oboe trombone banjo accordion organ saxophone tuba lute",
    "mandolin bassoon viola ukulele",
)
language = one_of(
    "French German Spanish Italian Arabic Hindi Japanese Korean Polish Turkish Swedish Greek Dutch Danish Finnish Czech",
    "Hungarian Persian Thai Vietnamese Russian Swahili Hebrew Norwegian",
)
city = one_of(
    "Lisbon Oslo Cairo Quito Hanoi Perth Turin Lagos Dublin Vienna Prague Warsaw Athens Madrid Berlin Geneva Kyoto Lima Dakar",
    "Boston Denver Montreal Santiago Nairobi Mumbai Bangkok Seoul Havana Tunis Riga Bergen Leipzig Naples Porto Seville Lyon",
)
item = one_of(
    "lamp kettle carpet mirror chair vase clock blanket basket ladder teapot candle curtain pillow drawer bucket hammer helmet",
    "jacket lantern mattress necklace oven painting radio saddle scarf sofa suitcase telescope toaster trunk umbrella wallet",
)
metal = one_of(
    "copper iron zinc nickel lead cobalt titanium chromium tungsten lithium magnesium aluminium platinum mercury uranium",
    "tin silver gold bronze brass steel",
)
ship = one_of(
    "Aurora Borealis Calypso Dauntless Endeavour Fortuna Galatea Halcyon Intrepid Juno Kestrel Leviathan Meteor Nautilus",
    "Orion Pegasus Resolute Sirius Triton Undine Valkyrie Windward Zephyr Albatross Beagle Corsair Dolphin Esmeralda",
)
event = one_of(
    "harvest wedding concert auction parade regatta exhibition election tournament funeral banquet strike eclipse flood fire",
    "treaty coronation inspection festival launch premiere referendum retreat summit voyage",
)
food = one_of(
    "bread butter cheese eggs flour garlic honey lentils milk mushrooms noodles onions pasta pepper potatoes rice salmon salt",
    "spinach sugar tomatoes tuna vinegar yogurt beans bacon carrots celery cream ginger ham mustard oats parsley turkey walnuts",
)
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"]
date = until_in_split(lambda rng: f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1700, 1999)}")
