"""Scorers with weights: one file per method, and their names."""

from learnkv.gates.base import Gate
from learnkv.gates.judge_q import JudgeQ
from learnkv.gates.kvp import KVP
from learnkv.gates.lookaheadkv import LookaheadKV

GATES: dict[str, type[Gate]] = {gate.METHOD: gate for gate in (KVP, LookaheadKV, JudgeQ)}
