"""`learnkv VERB ...` is `python -m learnkv.VERB ...`.  Help and completion are quick: nothing here imports torch, which takes seconds."""

from __future__ import annotations

import os
import runpy
import sys

from learnkv import config, say_interrupted
from learnkv.names import unknown
from learnkv.verbs import VERBS
from learnkv.version import __version__


def main() -> int:
    """The exit status where no verb runs; a verb's own comes out as SystemExit."""
    sys.excepthook = say_interrupted
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next
        from learnkv.candidates import answer

        answer()
    verb, *arguments = sys.argv[1:] or [""]
    if verb in ("", "--help", "-h", "--version"):
        config.tell(f"learnkv {__version__}" if verb == "--version" else overview())
        return 0 if verb else 2
    if verb not in VERBS:
        print(f"error: {unknown('verb', verb, VERBS)}; learnkv --help lists them all", file=sys.stderr)
        return 2
    sys.argv[1:] = arguments
    runpy.run_module(f"learnkv.{verb}", run_name="__main__", alter_sys=True)
    return 0


def overview() -> str:
    """Every verb with what it does and an example."""
    width = max(map(len, VERBS))
    rows = [f"  {name:<{width}}  {verb.does}\n  {'':<{width}}  learnkv {name} {verb.example}" for name, verb in VERBS.items()]
    last = "`learnkv VERB --help` lists its keys, their defaults and units; `learnkv VERB` is `python -m learnkv.VERB`"
    return "\n".join(["usage: learnkv VERB key=value ...", "", *rows, "", last])


if __name__ == "__main__":
    sys.exit(main())
