"""What is read out of learnkv's source without importing it is what an import finds."""

from dataclasses import fields
from importlib import import_module

import pytest

from learnkv import config, methods, models, sources
from learnkv.gates import GATES
from learnkv.verbs import VERBS

WITHOUT_KEYS = ("estimate",)  # takes those of other commands


@pytest.mark.parametrize("verb", sorted(set(VERBS) - set(WITHOUT_KEYS)))
def test_the_keys_of_a_command_are_those_of_its_help(verb):
    module = import_module(f"learnkv.{verb}")
    (schema,) = [found for name, found in vars(module).items() if name.endswith("Command") and found.__module__ == module.__name__]
    assert list(sources.keys(f"learnkv.{verb}")) == [name for name, _, _ in config.keys(schema)]


def test_literals_and_flags_are_offered_with_their_values():
    keys = sources.keys("learnkv.train")
    assert keys["dry"] == ["true", "false"] and keys["train.optimizer"] == ["adamw", "sgd"] and keys["train.lr"] == []
    assert keys["record.future"] == ["question_answer", "answer", "response"], "a name for a Literal, of another module"


@pytest.mark.parametrize("method", GATES)
def test_the_knobs_of_a_gate_are_its_configs(method):
    assert list(sources.knobs(method)) == [f"gate.{field.name}" for field in fields(GATES[method].Config)]


def test_a_heuristic_has_no_knobs_of_a_gate():
    assert sources.knobs("snapkv") == {}


def test_the_methods_are_the_registrys():
    found = [(m.name, f"arXiv:{m.paper}" if m.paper else "", "yes" if m.trained else "no") for m in sources.methods()]
    assert found == [(name, paper, trained) for name, paper, _, trained in methods.table()]


def test_the_models_are_the_bundled_ones():
    assert sources.models() == list(models.BUNDLED)
