"""Names of the files that gates, runs and traces consist of, for those who write them and those who look for them."""

from __future__ import annotations

CARD = "gate.json"  # of a gate
WEIGHTS = "gate.safetensors"
RECIPE = "recipe.yaml"  # of a run
LAST = "last.ckpt"
EVENTS = "events"  # a folder, TensorBoard's
CONFIG = "trace_config.json"  # of a folder of traces
MANIFEST = "manifest.parquet"
SHARDS = "traces-*.safetensors"
PARTS = "parts"  # a folder: traces that wait to be packed into a shard, one file each
ROWS = "rows.jsonl"  # of a comparison
RUN = "run.json"  # the commands that made its rows
PROMPTS = "prompts.jsonl"  # what they asked
EXAMPLE = "example.json"  # one prompt that methods were looked at on

# where commands look and write unless told otherwise
GATES_FOLDER = "checkpoints"
RUNS_FOLDER = "checkpoints/runs"
TRACES_FOLDER = "data/traces"
COMPARISONS_FOLDER = "data/comparisons"
