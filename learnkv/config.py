"""Recipes: a YAML file and key=value arguments into the typed dataclass that a command reads.

A command declares one dataclass with a `recipe: str` field (its default recipe, "" for none), plain values, and sections: dataclasses
that live beside what reads them.  A recipe file may hold sections of several commands; each takes its own.  A command that no recipe
speaks to has no such field.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import os
import re
import shlex
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, KeyValidationError, MissingMandatoryValue, OmegaConfBaseException

from learnkv.names import nearest, unknown

RECIPES = Path(__file__).parent / "recipes"

# what a recipe file may hold at its top; a command skips what is not its own, and anything else is a mistake
SHARED = frozenset({"model", "method", "prompts", "record", "gate", "train", "evaluate", "generate", "bench", "plan"})

KEY = r"[A-Za-z_][\w.]*"

S = TypeVar("S")


def main(run: Callable[[S], None], schema: type[S], argv: Sequence[str] | None = None, *, words: Sequence[str] = ()) -> int:
    """The exit status of `run` on the arguments, as `status_of` has it.

    words  keys of bare words, in order: with ("part",) `stream dtype=float32` is part=stream dtype=float32
    """

    def act() -> int:
        arguments = named(sys.argv[1:] if argv is None else argv, words)
        if "--help" in arguments or (takes_recipe(schema) and not arguments):
            tell(usage([a for a in arguments if a != "--help"], schema, run.__module__, words))
            return 0 if arguments else 2
        run(load(arguments, schema))
        return 0

    return status_of(act)


def status_of(act: Callable[[], int]) -> int:
    """What `act` returns, 2 after one line on a user's mistake, 130 after Ctrl-C, READER_GONE where nobody reads what it prints.

    Errors that are ours (AssertionError, TypeError, ...) keep their traceback.
    """
    try:
        status = act()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as in `... | head`
        silence()
        return READER_GONE
    except (ValueError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return status


READER_GONE = 141  # as the shell has it of what SIGPIPE ended


def silence() -> None:
    """Sends what is still to be printed nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(text: str) -> None:
    """Prints what was asked for; a reader who goes away in the middle of it, as `head` does, had enough of it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence()


def named(argv: Sequence[str], words: Sequence[str]) -> list[str]:
    """The arguments as key=value throughout: bare words get those of the keys that are not given, in order."""
    free = iter([word for word in words if not any(argument.startswith(f"{word}=") for argument in argv)])
    return [f"{key}={a}" if not re.match(rf"-|{KEY}=", a) and (key := next(free, "")) else a for a in argv]


def load(argv: Sequence[str], schema: type[S]) -> S:
    """The schema's defaults, then the recipe file, then the key=value arguments; later ones win.

    argv    ["recipe=kvp", "train.steps=100"]
    schema  a dataclass
    """
    return instance(resolve(argv, schema), schema)


def build(schema: type[S], values: Mapping[str, object], where: str) -> S:
    """A dataclass from plain values, for a section whose type depends on another key (a gate's config on its method).

    where  names the values in an error, "recipe kvp: gate"
    """
    return instance(merge(OmegaConf.structured(schema), OmegaConf.create(dict(values)), schema, where), schema)


def dump(recipe: object) -> str:
    """The resolved recipe as YAML that `recipe=FILE` reads again."""
    assert dataclasses.is_dataclass(recipe) and not isinstance(recipe, type)
    values = dataclasses.asdict(recipe)
    source = values.pop("recipe", "")
    return f"# resolved from recipe={source}\n" + yaml.safe_dump(plain(values), sort_keys=False, allow_unicode=True)


def arguments(command: object) -> str:
    """The command line that gives this command again: its recipe where it takes one, and each key=value that is not the recipe's."""
    assert dataclasses.is_dataclass(command) and not isinstance(command, type)
    recipe = [f"recipe={getattr(command, 'recipe', '')}"] if takes_recipe(type(command)) else []
    values, usual = (flat(dataclasses.asdict(c)) for c in (command, load(recipe, type(command))))
    values.pop("recipe", None)
    return shlex.join(
        [*recipe, *(f"{key}={argument_text(key, value, type(command))}" for key, value in values.items() if value != usual.get(key))]
    )


def flat(values: dict, prefix: str = "") -> dict[str, object]:
    """Nested values by dotted key."""
    out: dict[str, object] = {}
    for key, value in values.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def argument_text(key: str, value: object, schema: type) -> str:
    """A value as it is typed after key=, the other way round of `argument_value`."""
    if isinstance(value, str) and hint_of(key, schema) & {str, Path}:
        return value
    return inline(value)


def inline(value: object) -> str:
    """A value as YAML on one line."""
    return yaml.safe_dump(plain(value), default_flow_style=True, width=math.inf).removesuffix("...\n").strip()


def plain(value: object) -> object:
    """The value in YAML's own types: paths as text, tuples as lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return escape(str(value)) if isinstance(value, Path | str) else value


# ---- from text to values


def resolve(argv: Sequence[str], schema: type[S]) -> DictConfig:
    """The merged values, not yet an instance; mandatory ones may still be missing."""
    pairs = [split(argument) for argument in argv]
    name = dict(pairs).get("recipe", default_recipe(schema)) if takes_recipe(schema) else ""
    config = OmegaConf.structured(schema)
    if name:
        config = merge(config, shared_part(read_recipe(name), schema), schema, f"recipe {name}")
    for key, text in pairs:
        config = merge(config, argument_value(key, text, schema), schema, f"argument {key}={text}")
    return config


def split(argument: str) -> tuple[str, str]:
    key, equals, text = argument.partition("=")
    if not equals or not re.fullmatch(KEY, key):
        raise ValueError(f"argument {argument!r} is not of the form key=value; --help lists the keys")
    return key, text


def default_recipe(schema: type) -> str:
    field = {f.name: f for f in dataclasses.fields(schema)}["recipe"]
    assert isinstance(field.default, str), f"{schema.__name__}.recipe needs a default, '' for none"
    return field.default


def takes_recipe(schema: type) -> bool:
    return "recipe" in {field.name for field in dataclasses.fields(schema)}


def recipe_names() -> list[str]:
    """Every shipped recipe: `kvp`, `paper/kvp`, ..."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


def recipe_file(name: str) -> Path:
    """A path ending in .yaml is a file; anything else a shipped recipe."""
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ValueError(f"recipe file {name} does not exist; shipped recipes go by name: {', '.join(recipe_names())}")
        return Path(name)
    if name not in recipe_names():
        raise ValueError(f"{unknown('recipe', name, recipe_names())}; a recipe of your own ends in .yaml")
    return RECIPES / f"{name}.yaml"


def purpose(name: str) -> str:
    """The command that a recipe is for, by the sections it has."""
    sections = [str(key) for key in read_recipe(name)]
    found = next((command for section, command in PURPOSES.items() if section in sections), "")
    if not found:
        raise ValueError(f"recipe {name} is for no command: it has none of the sections {', '.join(PURPOSES)}; it has {sections}")
    return "train" if found == "record" and "method" in sections else found


PURPOSES = {
    "train": "train",
    "gate": "train",
    "evaluate": "evaluate",
    "bench": "bench",
    "plan": "plan",
    "record": "record",
}  # section -> command
ESTIMATED = ("train", "record", "evaluate")  # commands that learnkv.estimate speaks for


def read_recipe(name: str) -> DictConfig:
    """The values in a recipe's file, unchecked."""
    path = recipe_file(name)
    try:
        values = OmegaConf.load(path)
    except KeyValidationError as error:
        raise ValueError(f"recipe file {path} has a key that is no text ({one_line(error)}); write it in quotes, or drop it") from error
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ValueError(f"recipe file {path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(values, DictConfig):
        raise ValueError(f"recipe file {path} holds a {type(OmegaConf.to_object(values)).__name__}, not keys and values")
    refuse_other_keys(values, path)
    if "recipe" in values:
        raise ValueError(f"recipe file {path} names another recipe, {values.recipe}; a recipe is whole in itself")
    return values


def refuse_other_keys(values: DictConfig, path: Path) -> None:
    """Raises a ValueError for a key that YAML reads as something else than text: 1, or on, yes and off, which are true and false."""
    for key, value in values.items_ex(resolve=False):
        if not isinstance(key, str):
            kind = type(key).__name__
            raise ValueError(f"recipe file {path} has the key {key!r}, a {kind} in YAML and not text; write it in quotes, or drop it")
        if isinstance(value, DictConfig):
            refuse_other_keys(value, path)


def shared_part(values: DictConfig, schema: type) -> DictConfig:
    """Without the sections that other commands own: `gate: {width: 64}` is training's, where this command's `gate` is a folder."""
    own = {field.name for field in dataclasses.fields(schema)}
    plain = {key for key in own if hint_of(key, schema) & {str, int, float, bool}}
    sections = {key for key, value in values.items() if isinstance(value, DictConfig)}
    others = SHARED - own | SHARED & plain & sections
    return OmegaConf.masked_copy(values, [str(key) for key in values if key not in others])


def merge(config: DictConfig, values: DictConfig, schema: type, where: str) -> DictConfig:
    """OmegaConf's merge, its errors in our words."""
    mine, theirs = (typing.cast(dict, OmegaConf.to_container(c, resolve=False)) for c in (config, values))
    if wrong := misfit(mine, theirs):
        raise ValueError(f"{where}: {wrong}")
    try:
        return typing.cast(DictConfig, OmegaConf.merge(config, values))
    except OmegaConfBaseException as error:
        raise ValueError(f"{where}: {explain(error, schema)}") from error


def misfit(mine: dict, theirs: dict, prefix: str = "") -> str:
    """The first key that has keys of its own where the schema has a value or a list, or the other way round; "" for none."""
    for key in (key for key in theirs if mine.get(key) not in (None, MISSING) and theirs[key] is not None):
        wanted, found = (shape_of(side[key]) for side in (mine, theirs))
        if wanted != found:
            return f"{prefix}{key} takes {wanted}, this is {found}: {theirs[key]}"
        if found == KEYS and (inner := misfit(mine[key], theirs[key], f"{prefix}{key}.")):
            return inner
        if found == LIST and any(shape_of(item) != VALUE for item in theirs[key]):
            return f"{prefix}{key} is a list of plain values, this is {theirs[key]}"
    return ""


def shape_of(value: object) -> str:
    return KEYS if isinstance(value, dict) else LIST if isinstance(value, list | tuple) else VALUE


KEYS, LIST, VALUE = "keys with values", "a list", "one value"


def instance(config: DictConfig, schema: type[S]) -> S:
    try:
        made = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ValueError(explain(error, schema)) from error
    assert isinstance(made, schema)
    return made


def explain(error: OmegaConfBaseException, schema: type) -> str:
    """The key, what is wrong with its value, or which keys are near it."""
    key, text = error.full_key or "", str(error).splitlines()[0]
    if isinstance(error, MissingMandatoryValue):
        return f"a value is missing: {text.rpartition(': ')[2]}; give it as key=value"
    if isinstance(error, ConfigKeyError):
        names = [name for name, _, _ in keys(schema)]
        heads = {name.split(".")[0] for name in names}
        if key.split(".")[0] in SHARED - heads:
            return f"{key} belongs to another command"
        return f"unknown key {key!r}; {nearest(key, [*names, *heads])}"
    return f"{key}: {text}" if key and key not in text else text


def argument_value(key: str, text: str, schema: type) -> DictConfig:
    """One key=value as nested values.  Text for a text field is taken as it stands; everything else is read as YAML."""
    hint = hint_of(key, schema)
    if str in hint or Path in hint:
        return nested(key, None if text == "null" and type(None) in hint else escape(text))
    if hint & {list[str], tuple[str, ...]}:
        parts = text.removeprefix("[").removesuffix("]").split(",")
        return nested(key, [escape(part.strip().strip("'\"")) for part in parts if part.strip()])
    is_list = any(typing.get_origin(h) in (list, tuple) for h in hint)
    try:
        return OmegaConf.from_dotlist([f"{key}=[{text}]" if is_list and not text.startswith("[") else f"{key}={text}"])
    except yaml.YAMLError as error:
        raise ValueError(f"argument {key}={text} is not valid YAML: {one_line(error)}") from error


def nested(key: str, value: object) -> DictConfig:
    for part in reversed(key.split(".")):
        value = {part: value}
    return OmegaConf.create(typing.cast(dict, value))


def escape(text: str) -> str:
    """Text in which OmegaConf finds no ${interpolation}."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def hint_of(key: str, schema: type) -> set[object]:
    """The types a key may have, {} for an unknown one: {int, NoneType} for `int | None`."""
    found: object = schema
    for part in key.split("."):
        if not dataclasses.is_dataclass(found):
            return set()
        found = typing.get_type_hints(found).get(part)
    return set(typing.get_args(found)) if isinstance(found, types.UnionType) or typing.get_origin(found) is typing.Union else {found}


# ---- help


def usage(argv: Sequence[str], schema: type, module: str, words: Sequence[str] = ()) -> str:
    """What the command does, which recipes it may take, and every key with its value and comment."""
    config = resolve(argv, schema)
    rows = [(f"{name}={show(config, name)}", comment) for name, _, comment in keys(schema)]
    width = min(max(len(left) for left, _ in rows), 48)
    lines = [f"  {left:<{width}}  {comment}".rstrip() for left, comment in rows]
    about = inspect.cleandoc(sys.modules[module].__doc__ or "")
    recipes = [*recipe_lines(), ""] if takes_recipe(schema) else []
    shape = " ".join([*(f"[{word.upper()}]" for word in words), *["recipe=NAME"] * bool(recipes and not words), "key=value ..."])
    return "\n".join([f"usage: python -m {name_of(module)} {shape}", "", about, "", *recipes, *lines])


def recipe_lines() -> list[str]:
    """The shipped recipes by name, those with a paper's own settings apart."""
    names = recipe_names()
    own = [name for name in names if "/" not in name]
    papers = [name.removeprefix("paper/") for name in names if name.startswith("paper/")]
    lines = [f"recipes: {', '.join(own)}, or a .yaml file", f"paper/NAME, as published: {', '.join(papers)}"]
    return [textwrap.fill(line, 110, subsequent_indent="  ") for line in lines]


def name_of(module: str) -> str:
    """`learnkv.train` also where it runs as __main__."""
    spec = sys.modules[module].__spec__
    return spec.name if spec else module


def show(config: DictConfig, key: str) -> str:
    """A value as it would be typed; a mandatory one that is still missing shows as ???."""
    value = OmegaConf.select(config, key, default="???")
    if OmegaConf.is_config(value):
        return inline(OmegaConf.to_container(value))
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def keys(schema: type, prefix: str = "") -> Iterator[tuple[str, object, str]]:
    """(dotted key, type, comment) of every value in a schema, sections opened."""
    hints, comments = typing.get_type_hints(schema), field_comments(schema)
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from keys(hint, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hint, comments.get(field.name, "")


def field_comments(schema: type) -> dict[str, str]:
    """Field -> the comment at the end of its lines, for a dataclass and those it extends."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(base))
        (definition,) = ast.parse(source).body
        for node in ast.walk(definition):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                found[node.target.id] = " ".join(re.findall(r"  # (.*)$", "\n".join(lines), re.MULTILINE))
    return found


def one_line(error: BaseException) -> str:
    """An error's text without line breaks; of an OSError what failed and on which file."""
    if isinstance(error, FileExistsError) and error.filename:
        return f"{error.filename} is a file, where a folder should be made; give another path"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
