"""Scorers with weights: one file per method, and their names."""

from learnkv.gates.base import Gate
from learnkv.gates.dms import DMS
from learnkv.gates.duo_attention import DuoAttention
from learnkv.gates.fast_kvzip import FastKVzip
from learnkv.gates.foresight import Foresight
from learnkv.gates.judge_q import JudgeQ
from learnkv.gates.kvp import KVP
from learnkv.gates.kvzap import KVzap
from learnkv.gates.locret import Locret
from learnkv.gates.lookaheadkv import LookaheadKV
from learnkv.gates.trimkv import TrimKV

GATES: dict[str, type[Gate]] = {
    gate.METHOD: gate for gate in (KVP, LookaheadKV, JudgeQ, FastKVzip, KVzap, Locret, TrimKV, DMS, DuoAttention, Foresight)
}
