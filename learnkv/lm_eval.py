"""lm-evaluation-harness with learnkv's model: everything that `lm_eval` takes, and `--model learnkv`.

lm-eval 0.4.13 finds models of its own package only, so this imports ours, which registers it, and then runs lm-eval's own command.

python -m learnkv.lm_eval --model learnkv --model_args pretrained=smollm2-135m,method=snapkv,budget=0.2 --tasks arc_easy
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

from learnkv import config


def run() -> int:
    """lm-eval's command; ValueError where lm-eval is not installed."""
    if find_spec("lm_eval") is None:
        raise ValueError("lm-evaluation-harness is not installed; run: pip install 'learnkv[lm-eval]'")
    from lm_eval.__main__ import cli_evaluate

    import_module("learnkv.evaluation.harness")  # registers the model
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(config.status_of(run))
