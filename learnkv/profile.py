"""Profile a model on your prompts: where its heads look, and which budgets and allocators that suggests.

python -m learnkv.profile prompts=mine.jsonl                    JSONL with context, question, answer, or plain text
python -m learnkv.profile model=my/model prompts=notes.txt out=data/profiles/notes
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tqdm import tqdm

from learnkv import config
from learnkv.evaluation import report
from learnkv.evaluation.profile import ProfileSettings, profile
from learnkv.models import DTYPES, load_model
from learnkv.prompts import Prompt, load_prompts


@dataclass
class ProfileCommand:
    """What `python -m learnkv.profile` reads."""

    recipe: str = ""  # a .yaml file with these keys, or none
    model: str = "smollm2-135m"  # bundled name, hub id or folder
    prompts: str = ""  # your prompts: JSONL with context, question, answer, or plain text
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of model and cache
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    out: str = "data/profiles/profile"  # folder of profile.json and profile.png


def run(command: ProfileCommand) -> None:
    if not command.prompts:
        raise ValueError("prompts= is missing; give your own, prompts=mine.jsonl with context, question and answer, or a text file")
    prompts = load_prompts(command.prompts)
    model, tokenizer = load_model(command.model, DTYPES[command.dtype])
    found = profile(model, tokenizer, prompts, command.profile, progress=barred)
    print(f"model: {command.model}, {command.dtype}")
    print(f"prompts: {found.prompts}, contexts of {found.tokens[0]} to {found.tokens[1]} tokens")
    print(f"full cache: {found.nbytes:,.0f} bytes a token, {found.nbytes * found.tokens[1] / 2**20:.1f} MiB for the longest prompt")
    print(f"\n{report.aligned(found.cells())}\n\n{report.aligned(found.coverage_cells())}\n")
    for suggestion in found.suggestions():
        print(suggestion)
    figures, picture = found.save(command.out)
    print(f"figures by layer and head: {figures}\npicture: {picture}")
    print(f"next: python -m learnkv.evaluate model={command.model} prompts={command.prompts} method=snapkv")


def barred(prompts: Sequence[Prompt]) -> Iterable[Prompt]:
    return tqdm(prompts, desc="profile", unit="prompt", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(config.main(run, ProfileCommand))
