"""Runs RULER's own generators, as the wheel of the asset `ruler` holds them, in a process of their own.

python -m tests.ruler_original PACKAGE WORDS TOKENIZER OUT NUM_TOKENS COUNT SEED TASK...
writes OUT/TASK/validation.jsonl.  What the generators import and this project does not need is stood in for: tenacity, which is for other
tokenizers, and nltk, whose data can't be had here, by our own sentences.
"""

import runpy
import sys
import types
from pathlib import Path

import yaml

from learnkv.tasks.ruler_data import sentences


def stand_in() -> None:
    """Modules that the original imports."""
    nltk, tokenize, tenacity = (types.ModuleType(name) for name in ("nltk", "nltk.tokenize", "tenacity"))
    vars(nltk)["tokenize"] = tokenize
    vars(tokenize)["sent_tokenize"] = sentences
    vars(tenacity)["retry"] = lambda *args, **kwargs: lambda function: function
    vars(tenacity).update({name: lambda *args: 0 for name in ("stop_after_attempt", "wait_fixed", "wait_random")})
    sys.modules.update({"nltk": nltk, "nltk.tokenize": tokenize, "tenacity": tenacity})


def generate(package: Path, tokenizer: str, out: str, num_tokens: str, count: str, seed: str, names: list[str]) -> None:
    from long_context_eval.data.synthetic.constants import TASKS

    tasks = yaml.safe_load((package / "long_context_eval" / "synthetic.yaml").read_text())
    for name in names:
        family, settings = tasks[name]["task"], tasks[name]["args"]
        base = TASKS[family]
        options = {
            "save_dir": out,
            "save_name": name,
            "tokenizer_path": tokenizer,
            "tokenizer_type": "hf",
            "max_seq_length": num_tokens,
            "tokens_to_generate": base["tokens_to_generate"],
            "num_samples": count,
            "random_seed": seed,
            "template": base["template"] + base["answer_prefix"],
            **settings,
        }
        sys.argv = [family, *(text for key, value in options.items() for text in (f"--{key}", str(value)))]
        runpy.run_path(str(package / "long_context_eval" / "data" / "synthetic" / f"{family}.py"), run_name="__main__")


if __name__ == "__main__":
    package, words, tokenizer, out, num_tokens, count, seed, *names = sys.argv[1:]
    stand_in()
    sys.path[:0] = [package, words, f"{package}/long_context_eval/data/synthetic"]
    generate(Path(package), tokenizer, out, num_tokens, count, seed, names)
