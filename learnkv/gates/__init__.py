"""Scorers with weights: one file per method, and their names."""

from learnkv.gates.base import Gate
from learnkv.gates.dms import DMS
from learnkv.gates.duo_attention import DuoAttention
from learnkv.gates.kvp import KVP
from learnkv.gates.trimkv import TrimKV

GATES: dict[str, type[Gate]] = {gate.METHOD: gate for gate in (KVP, TrimKV, DMS, DuoAttention)}
