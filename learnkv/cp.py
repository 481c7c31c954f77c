"""Copy a shipped recipe to a file of your own, to be edited and run as recipe=FILE.

python -m learnkv.cp kvp                          to kvp.yaml
python -m learnkv.cp paper/lookaheadkv mine.yaml
A file that is there is never written over.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from learnkv import config
from learnkv.names import unknown


@dataclass
class CpCommand:
    """What `python -m learnkv.cp` reads."""

    recipe: str = ""  # a shipped recipe, kvp or paper/kvp
    to: str = ""  # the file, or a folder that is there; "" for the recipe's name in the working folder


def run(command: CpCommand) -> None:
    if command.recipe not in config.recipe_names():
        raise unknown("recipe", command.recipe, config.recipe_names())
    path = copy(command.recipe, target(command))
    argument, verb = shlex.quote(f"recipe={path}"), config.purpose(command.recipe)
    estimate = [f"what it would take: python -m learnkv.estimate {argument}"] if verb in config.ESTIMATED else []
    config.tell("\n".join([f"recipe: {path}", *estimate, f"next: edit it, then python -m learnkv.{verb} {argument}"]))


def target(command: CpCommand) -> Path:
    """Where the copy goes: paper/kvp to paper-kvp.yaml, unless the user says otherwise."""
    path, name = Path(command.to), f"{command.recipe.replace('/', '-')}.yaml"
    return path / name if path.is_dir() else path


def copy(recipe: str, path: Path) -> Path:
    """The recipe's file, whole, in a file that was not there."""
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"to={path} does not end in .yaml, by which recipe= tells a file from a shipped recipe; give {path}.yaml")
    content = config.recipe_file(recipe).read_bytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError as error:
        raise ValueError(f"{path} is there already and is never written over; give another name") from error
    return path


if __name__ == "__main__":
    sys.exit(config.main(run, CpCommand, words=("recipe", "to")))
