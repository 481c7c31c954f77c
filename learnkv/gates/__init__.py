"""Scorers with weights: one file per method, and their names."""

from learnkv.gates.base import Gate
from learnkv.gates.kvp import KVP

GATES: dict[str, type[Gate]] = {gate.METHOD: gate for gate in (KVP,)}
