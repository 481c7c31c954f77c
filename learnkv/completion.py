"""Print what lets a shell complete verbs, recipes, methods, keys and their values after `learnkv`.

eval "$(learnkv completion bash)"                                   in ~/.bashrc
eval "$(learnkv completion zsh)"                                    in ~/.zshrc, after compinit
learnkv completion fish > ~/.config/fish/completions/learnkv.fish   once
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from argcomplete import shellcode

from learnkv import config


@dataclass
class CompletionCommand:
    """What `python -m learnkv.completion` reads."""

    shell: Literal["bash", "zsh", "fish"] = "bash"


def run(command: CompletionCommand) -> None:
    config.tell(shellcode(["learnkv"], shell=command.shell))


if __name__ == "__main__":
    sys.exit(config.main(run, CompletionCommand, words=("shell",)))
