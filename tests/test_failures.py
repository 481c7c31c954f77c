"""Kinds on which eviction fails first: what each asks for, that none is trained on, that all can be compared, and what pins do."""

import json
import re
from uuid import UUID

import pytest
import torch

from learnkv import config
from learnkv.budgets import Ratio
from learnkv.evaluate import EvaluateCommand, run
from learnkv.evaluation.rows import read_rows
from learnkv.methods import METHODS
from learnkv.prompts import Prompt, Question, encode, make
from learnkv.prompts.failures import FAILURE_KINDS
from learnkv.prompts.kinds import HELDOUT_KINDS, IDENTIFIER_KINDS, KINDS, TRAIN_KINDS
from learnkv.record import RecordCommand
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import prefill_many
from tests.comparison_parts import letter_tokenizer, tiny_model
from tests.recording import byte_tokenizer


def made(kind, count=6, split="heldout", num_tokens=2500):
    return make([kind], split=split, count=count, num_tokens=num_tokens, tokenizer=byte_tokenizer())


def asked(kind, **changes):
    return [(prompt, question) for prompt in made(kind, **changes) for question in prompt.questions]


def test_failures_are_kinds_and_no_others():
    assert set(FAILURE_KINDS) <= set(KINDS)
    assert not set(FAILURE_KINDS) & {*TRAIN_KINDS, *HELDOUT_KINDS, *IDENTIFIER_KINDS}


@pytest.mark.parametrize("recipe", config.recipe_names())
def test_no_recipe_trains_on_a_failure(recipe):
    assert not set(FAILURE_KINDS) & set(config.load([f"recipe={recipe}"], RecordCommand).record.kinds)


# ---- what is asked for


def test_uuids_are_uuids_and_every_one_of_them_is_another():
    answers = [question.answer.strip() for _, question in asked("uuids")]
    assert all(str(UUID(answer)) == answer and UUID(answer).version == 4 for answer in answers)
    assert len(set(answers)) == len(answers) == 12


def test_identifiers_look_like_nothing_in_the_text():
    for prompt, question in asked("identifiers"):
        answer = question.answer.strip()
        assert re.fullmatch(r"[A-Z]{2}-\d{4}-[A-Z]|[0-9a-f]{16}|[a-z0-9]{10}", answer)
        assert prompt.context.count(answer) == 1


@pytest.mark.parametrize("length", [12, 20])
def test_numbers_have_all_their_digits(length):
    assert all(re.fullmatch(rf" [1-9]\d{{{length - 1}}}", question.answer) for _, question in asked(f"digits_{length}"))


def test_the_second_hop_is_reached_through_the_first_alone():
    for prompt, question in asked("two_hops"):
        answer = question.answer.strip()
        (last,) = re.findall(rf"(?:The (\w+) opens with the number|The harbour of (\w+) is run by) {answer}\.", prompt.context)
        middle = "".join(last)
        assert middle not in question.text + question.prefix, "the question does not say what lies between"
        (start,) = re.findall(rf"(?:The parcel for (\w+) lies in the|The (\w+) sails to) {middle}\.", prompt.context)
        assert "".join(start) in question.text


def test_an_instruction_stands_first_and_decides_the_answer_but_is_not_asked_again():
    for prompt, question in asked("instruction"):
        order, word = re.match(r"(Begin|End) every answer with the word (\w+)", prompt.context).groups()
        words = question.answer.split()
        assert words[0 if order == "Begin" else 1] == word and words[1 if order == "Begin" else 0].isdigit()
        assert word not in question.text + question.prefix


# ---- the agent


def test_an_agents_rule_and_schema_stand_in_turn_1_and_are_asked_for_after_the_last():
    for prompt in made("agent_synth"):
        first, *rest = re.split(r"^(?=Turn \d+\. )", prompt.context, flags=re.MULTILINE)[1:]
        assert first.count('{"tool": ') == 3 and "Sign every call with the name" in first
        assert [int(re.match(r"Turn (\d+)", turn)[1]) for turn in rest] == list(range(2, len(rest) + 2)) and len(rest) >= 2
        kinds = {"must be signed": 0, "takes the argument": 0, "the tool returned": 0}
        for question in prompt.questions:
            (kind,) = (kind for kind in kinds if kind in question.prefix)
            kinds[kind] += 1
            assert (question.span[0] < len(first)) == (kind != "the tool returned")
            assert question.text.startswith(f"Turn {len(rest) + 2}. ") or kind == "the tool returned"
        assert set(kinds.values()) == {1}


def test_more_tokens_are_more_turns():
    count = [made("agent_synth", 1, num_tokens=n)[0].context.count("\nTurn ") for n in (1500, 4000)]
    assert count[0] < count[1] and count[1] > 5


def test_the_pinned_agent_has_the_same_text_and_pins_turn_1():
    for plain, pinned in zip(made("agent_synth"), made("agent_synth_pinned"), strict=True):
        assert (plain.context, plain.questions) == (pinned.context, pinned.questions) and not plain.pins
        ((start, stop),) = pinned.pins
        assert start == 0 and pinned.context[stop:].startswith("Turn 2. ") and plain.id != pinned.id


def test_pins_become_the_tokens_of_their_characters():
    prompt = Prompt("user", "user", "abcdefgh", (Question("?", "", "x"),), chat=False, pins=((2, 5), (6, 7)))
    encoded = encode(byte_tokenizer(), prompt, prompt.questions[0])
    assert encoded.pins == ((2, 5), (6, 7)) and encoded.span is None


def test_a_prompt_without_pins_has_the_id_it_always_had():
    """Rows and traces of earlier runs name prompts by it."""
    assert Prompt("codes", "train", "Ann has 3 cats.\n", (Question("How many?", "She has", " 3", (8, 9)),)).id == "90492834798accbd"


def test_what_is_pinned_survives_every_policy_and_no_other_cache():
    model, ids = tiny_model(), torch.randint(2, 60, (1, 100), generator=torch.Generator().manual_seed(0))
    policies = [METHODS[name](Ratio(0.4), num_sinks=2, num_recent=4) for name in ("random", "snapkv", "streaming_llm")]
    wanted = set(range(20, 40))

    def held(pins):
        with attach(model):
            return [[set(head.tolist()) for layer in cache.kept_positions() for head in layer[0]] for cache in run_with(pins)]

    def run_with(pins):
        return prefill_many(model, ids, policies, pins=pins)

    assert all(wanted <= head and len(head) == 40 for heads in held([(20, 40)]) for head in heads)
    assert not any(wanted <= head for heads in held([]) for head in heads)


# ---- comparisons


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("failures")
    tiny_model(max_tokens=2048).save_pretrained(made / "model")
    letter_tokenizer().save_pretrained(made / "model")
    return made


def test_every_failure_can_be_compared(folder, tmp_path, capsys):
    kinds = ",".join(FAILURE_KINDS)
    fixed = [f"model={folder / 'model'}", f"evaluate.kinds=[{kinds}]", f"evaluate.out={tmp_path}", "evaluate.num_tokens=[900]"]
    assert config.main(run, EvaluateCommand, [*fixed, "method=snapkv", "budget=0.2", f"evaluate.count={len(FAILURE_KINDS)}"]) == 0
    rows = read_rows(tmp_path / "rows.jsonl")
    assert {row.kind for row in rows} == set(FAILURE_KINDS)
    for kind in ("agent_synth", "agent_synth_pinned"):
        said = [row.kept_mean > 0.2 * row.num_tokens + 1 for row in rows if row.kind == kind and row.scorer != "full"]
        assert all(said) if kind == "agent_synth_pinned" else not any(said), "turn 1 is more than the budget here"
    assert "budget 0.2 is less than 3 rows pin beside what is protected: they held more" in capsys.readouterr().out
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])["split"] == "heldout"
