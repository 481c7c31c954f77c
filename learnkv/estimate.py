"""Say what a recipe would take before it runs: sizes, disk, tokens, FLOPs, or hours.

python -m learnkv.estimate recipe=paper/kvp                  recording and training: no weights are loaded, nothing runs or is written
python -m learnkv.estimate recipe=kvp record.train=500       with keys of the command that the recipe is for
python -m learnkv.estimate recipe=compare                    a comparison: one prompt is measured on this machine
It is dry=true of train and record, and estimate=true of evaluate.  `recipe=NAME --help` lists the keys.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from learnkv import config, evaluate, record, train

ESTIMATES: dict[str, Callable[[list[str]], int]] = {
    "train": lambda argv: config.main(train.run, train.TrainCommand, [*argv, "dry=true"]),
    "record": lambda argv: config.main(record.run, record.RecordCommand, [*argv, "dry=true"]),
    "evaluate": lambda argv: config.main(evaluate.run, evaluate.EvaluateCommand, [*argv, "estimate=true"]),
}


def main(argv: Sequence[str]) -> int:
    """The exit status of the command that the recipe is for, told to estimate."""
    return config.status_of(lambda: estimate(list(argv)))


def estimate(argv: list[str]) -> int:
    given = dict(config.split(argument) for argument in argv if argument != "--help")
    if not given:
        config.tell("\n".join(["usage: python -m learnkv.estimate recipe=NAME key=value ...", "", f"{__doc__}", *config.recipe_lines()]))
        return 0 if argv else 2
    if not given.get("recipe"):
        raise ValueError("recipe= is missing; name what would run, recipe=kvp or recipe=own.yaml")
    command = config.purpose(given["recipe"])
    if command not in ESTIMATES:
        raise ValueError(f"recipe {given['recipe']} is for {command}, which has no estimate; {', '.join(ESTIMATES)} have one")
    status = ESTIMATES[command](argv)
    return 0 if status == config.READER_GONE else status  # nothing was left undone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
