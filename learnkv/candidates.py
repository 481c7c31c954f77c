"""What a shell may offer next on a line that begins with `learnkv`; argcomplete does the talking with the shell."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import argcomplete
from argcomplete.completers import DirectoriesCompleter, FilesCompleter

from learnkv import config, sources
from learnkv.places import GATES_FOLDER, RUNS_FOLDER, WEIGHTS
from learnkv.verbs import VERBS


def answer() -> None:
    """Writes what may come next where argcomplete's shell code reads it, and ends the process."""
    parser = argparse.ArgumentParser("learnkv", add_help=False)
    parser.add_argument("verb", choices=list(VERBS))
    words = parser.add_argument("words", nargs="*")
    words.completer = complete  # type: ignore[attr-defined]  # argcomplete's door
    parser.add_argument("--help", action="store_true")
    argcomplete.autocomplete(parser, always_complete_options=False)


def complete(prefix: str, action: argparse.Action, parser: argparse.ArgumentParser, parsed_args: argparse.Namespace) -> list[str]:
    """argcomplete's call for the word under the cursor."""
    try:
        return candidates(parsed_args.verb, parsed_args.words or [], prefix)
    except (ValueError, OSError):  # a recipe that can't be read: a shell has no place to say so
        return []


def candidates(verb: str, given: Sequence[str], prefix: str) -> list[str]:
    """Words that go on from `prefix`, after the words given behind the verb: keys with their =, or values."""
    known = keys(verb, given)
    key, equals, typed = prefix.partition("=")
    if equals:
        return [f"{key}={value}" for value in values(verb, key, known.get(key, []), typed)]
    word = VERBS[verb].word
    bare = values(verb, word, known.get(word, []), prefix) if word and not given else []
    used = {argument.partition("=")[0] for argument in given}
    return [*bare, *(f"{name}=" for name in known if name not in used)]


def keys(verb: str, given: Sequence[str]) -> dict[str, list[str]]:
    """Every key of the command, a gate's knobs among them, with the values that it is limited to."""
    values = dict(argument.partition("=")[::2] for argument in given)
    recipe = values.get("recipe", "")
    if verb == "estimate":  # it takes what the recipe's own command takes
        return keys(config.purpose(recipe), given) if recipe else {"recipe": []}
    found = sources.keys(f"learnkv.{verb}")
    if verb != "train":
        return found
    del found["gate"]  # its knobs hang on the method
    method = values.get("method") or (config.read_recipe(recipe).get("method") if recipe else "")
    return found | sources.knobs(f"{method}")


def values(verb: str, key: str, choices: list[str], typed: str) -> list[str]:
    """What a key may be; files where it names one."""
    if choices:
        return choices
    if key == "recipe":
        return [*config.recipe_names(), *(FilesCompleter(["yaml", "yml"])(typed) if verb != "cp" else [])]
    if key == "method":
        return [method.name for method in sources.methods() if method.trained or verb not in ("train", "bench")]
    if key == "model":
        return [*sources.models(), *DirectoriesCompleter()(typed)]
    if key == "gate":
        return [f"{path.parent}" for folder in (GATES_FOLDER, RUNS_FOLDER) for path in sorted(Path(folder).glob(f"*/{WEIGHTS}"))]
    return list(FilesCompleter()(typed)) if key in FILES else []


FILES = {
    "path",
    "to",
    "prompts",
    "file",
    "runs",
    "out",
    "record.folder",
    "evaluate.out",
    "evaluate.choose",
    "checkpoints",
    "traces",
    "rows",
    "tally",
    "plan.trace",
}
