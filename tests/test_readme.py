"""The README says what the code does: its commands, recipes, files and table of methods exist."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from learnkv import config, methods
from learnkv.tasks import registry
from learnkv.verbs import VERBS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
# those of lm-eval, which has its own arguments, are tried in test_lm_eval.py
COMMANDS = sorted(set(re.findall(r"python -m (learnkv\.(?!lm_eval)\w+)((?: [\w.]+=\S+?)*)(?=[`\s])", README)))


def schema_of(module: str, arguments: Sequence[str] = ()) -> type:
    """The dataclass that a command reads; `estimate` reads what the recipe's own command does."""
    if module == "learnkv.estimate":
        recipe = dict(config.split(argument) for argument in arguments).get("recipe", "kvp")
        return schema_of(f"learnkv.{config.purpose(recipe)}")
    found = vars(importlib.import_module(module))
    (schema,) = [value for name, value in found.items() if name.endswith("Command") and value.__module__ == module]
    return schema


def test_the_quick_start_is_two_lines_of_which_each_sets_up_everything():
    setup = [block.strip() for _, block in BLOCKS if block.startswith("python3 -m venv")]
    assert len(setup) == 2 and all("\n" not in line for line in setup)
    first, second = (line.split(" && ") for line in setup)
    assert first[:2] == second[:2], "the order of the two must not matter"


def test_the_quick_start_installs_a_torch_that_the_package_admits():
    pins = set(re.findall(r'"torch==([\d.]+)"', README))
    (low, high) = re.search(r'"torch>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text()).groups()  # type: ignore[union-attr]
    numbers = [tuple(int(n) for n in text.split(".")) for text in (low, *pins, high)]
    assert len(pins) == 1 and numbers == sorted(numbers)


@pytest.mark.parametrize(("module", "arguments"), COMMANDS)
def test_a_command_in_the_readme_exists_with_its_recipe_and_keys(module, arguments):
    given = [a for a in shlex.split(arguments) if a != "recipe=own.yaml"]
    config.load(given, schema_of(module, given))


@pytest.mark.parametrize("recipe", config.recipe_names())
def test_every_shipped_recipe_loads_in_each_command_that_it_has_keys_for(recipe):
    keys = set(config.read_recipe(recipe))
    schemas = {module: schema_of(module) for module in sorted({module for module, _ in COMMANDS})}
    takers = [schema for schema in schemas.values() if keys & {f.name for f in dataclasses.fields(schema)} - {"model"}]
    assert takers
    for schema in takers:
        config.load([f"recipe={recipe}"], schema)


def test_the_table_of_the_flow_has_a_row_for_every_verb():
    table = README.partition("| command | does |\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `python -m learnkv\.(\w+)", table, re.MULTILINE)) == set(VERBS)


def test_recipes_named_in_the_readme_are_shipped():
    named = set(re.findall(r"recipe=([\w/]+)(?![\w/]*\.yaml)\b", README)) - {"own"}
    assert named <= set(config.recipe_names())


def test_the_table_of_methods_is_the_registrys():
    table = README.partition("<!-- learnkv.methods.table() -->\n")[2].partition("<!-- end -->")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()[2:]]
    wanted = [(f"`{name}`", *rest) for name, *rest in methods.table()]
    missing = [f"| {' | '.join(row)} |" for row in wanted if row not in rows]
    assert rows == wanted, "README.md's table of methods should hold, in the registry's order:\n" + "\n".join(missing)


def test_the_table_of_tasks_is_the_registrys():
    found = README.partition("<!-- learnkv.tasks.registry.table() -->\n")[2].partition("<!-- end -->")[0]
    rows = [tuple(cell.strip(" `") for cell in line.strip("|").split("|")) for line in found.splitlines()[2:] if line]
    assert rows == registry.table()


def test_every_figure_names_the_command_that_makes_it():
    """Between a results heading and each table of it stands a command."""
    results = README.partition("## Results")[2].partition("\n## ")[0]
    for number, part in enumerate(re.split(r"^\|[-| :]+\|$", results, flags=re.MULTILINE)[:-1]):
        assert "python -m learnkv." in part, f"table {number + 1} of the results has no command before it"


def test_python_in_the_readme_names_what_learnkv_has():
    import learnkv

    used = {name for kind, block in BLOCKS if kind == "python" for name in re.findall(r"learnkv\.(\w+)", block)}
    assert used | set(re.findall(r"`learnkv\.(\w+)\(", README)) - {"methods"} <= set(dir(learnkv))


def test_paths_in_the_readme_exist():
    paths = set(re.findall(r"`((?:learnkv|kernels|recipes|tests|checkpoints|data|\.ci)/[\w./-]*)`", README))
    assert not {path for path in paths if not (ROOT / path).exists()}
