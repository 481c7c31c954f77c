"""Whether the simulator has been held against a real server: the one place that says so, for every output.

`validation.json` beside this module, absent until someone replays a trace through a continuous batcher on an EvictionCache:

    {"format_version": 1,
     "machines": {"<card>": {"commit": "...", "requests": 200, "errors": {"tokens_s": 0.04, "ttft_s": 0.11, "tpot_s": 0.06}}}}

<card> is a name of learnkv.serving.cards, or the device that a result of `bench kernels` names; errors are relative, |predicted -
measured| / measured.  A machine counts as validated where each of ERRORS is there and at most TOLERATED.
"""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).with_name("validation.json")
ERRORS = ("tokens_s", "ttft_s", "tpot_s")
TOLERATED = 0.2


def standing(card: str, results: Path | None = None) -> str:
    """The first line of all that is said of a card.

    results  RESULTS, unless a test has others
    """
    path = results or RESULTS
    if not path.exists():
        return f"unvalidated: no real server was ever held against this simulator; read ratios, not figures ({card})"
    found = json.loads(path.read_text())["machines"].get(card)
    if found is None:
        return f"unvalidated: no server on {card} was held against this simulator; read ratios, not figures"
    errors = {name: float(found["errors"].get(name, "inf")) for name in ERRORS}
    told = ", ".join(f"{name} {100 * error:.0f}% off" for name, error in errors.items())
    if max(errors.values()) > TOLERATED:
        return f"unvalidated: on {card} it predicted {told}, more than {TOLERATED:.0%}"
    return f"validated: {found['requests']} requests on {card} at {found['commit']}: {told}"
