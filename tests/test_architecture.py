"""Which module may import what.  The table below is the architecture; a new area needs a row here first."""

import ast
import graphlib
from pathlib import Path

import pytest

from learnkv.verbs import VERBS

ROOT = Path(__file__).resolve().parents[1]

#  area            may import: other areas of learnkv, and the outside packages we watch
ALLOWED = {
    "kernels":     {"triton"},
    "names":       set(),
    "counts":      set(),
    "files":       set(),
    "version":     set(),
    "rope":        set(),
    "geometry":    {"rope", "capture"},
    "typed":       set(),
    "locks":       set(),
    "places":      set(),
    "verbs":       set(),
    "sources":     set(),
    "config":      {"names", "omegaconf"},
    # without torch, so that `learnkv ls` and a shell's completion need not wait for it
    "__main__":    {"names", "version", "verbs", "config", "candidates"},
    "candidates":  {"verbs", "places", "sources", "config"},
    "inventory":   {"counts", "places", "config"},
    "ops":         {"kernels"},
    "observation": {"ops"},
    "budgets":     {"ops", "observation"},
    "policy":      {"names", "counts", "ops", "observation", "budgets"},
    "prompts":     {"names"},
    "assets":      {"names", "locks"},
    "tasks":       {"names", "counts", "assets", "prompts", "datasets"},
    "models":      {"names", "ops", "rope", "geometry", "assets", "capture", "transformers"},
    "capture":     {"ops", "assets", "transformers"},
    "projection":  {"capture"},
    "reconstruction": {"ops", "observation"},
    "heuristics":  {"names", "ops", "rope", "geometry", "projection", "reconstruction", "observation", "budgets", "policy"},
    "gates":       {"names", "files", "ops", "rope", "geometry", "observation", "capture", "models", "traces", "peft"},
    "methods":     {"names", "heuristics", "gates", "checkpoint", "policy", "budgets", "observation"},
    "traces":      {"names", "places", "files", "counts", "typed", "locks", "version", "ops", "geometry", "capture", "observation",
                    "projection", "reconstruction", "models", "prompts", "datasets"},
    "calibration": {"files", "geometry", "capture", "models", "prompts", "traces"},
    "runtime":     {"names", "counts", "version", "ops", "rope", "geometry", "observation", "policy", "budgets", "capture", "transformers",
                    "peft"},
    "training":    {"names", "places", "files", "ops", "gates", "traces", "lightning"},
    "kvpress_decode": {"kvpress", "transformers"},
    # runs lm-eval's own command, whose model of ours is in evaluation
    "lm_eval":     {"config", "evaluation"},
    "checkpoint":  {"names", "places", "files", "typed", "version", "config", "gates", "models", "traces"},
    "published":   {"capture", "gates", "models"},
    "outline":     {"counts", "gates", "geometry", "models", "prompts", "reconstruction", "traces", "training"},
    "contents":    {"counts", "places", "config", "inventory", "checkpoint", "models", "gates", "traces", "evaluation", "presses"},
    "serving":     {"names", "files", "models", "evaluation"},
    "machine":     {"counts", "version", "ops", "assets", "models", "traces", "outline"},

    # of kernels the plain functions, which are written out into the exported file
    "presses":     {"names", "files", "version", "sources", "rope", "geometry", "capture", "kernels", "budgets", "gates", "checkpoint",
                    "traces", "kvpress", "transformers"},
}  # fmt: skip
COMMANDS = tuple(VERBS)
LIGHT = ("ls", "cp", "completion")  # commands that import no torch
INSIDE = {*ALLOWED, "evaluation"}
OUTSIDE = {"triton", "transformers", "peft", "lightning", "datasets", "omegaconf", "kvpress", "lm_eval"}
# lm_eval the package, not our command of that name, which imports evaluation
ALLOWED["evaluation"] = INSIDE - {"config", "kernels"} | {"datasets", "lm_eval"}
ALLOWED |= {command: INSIDE - {"kernels"} for command in COMMANDS}
ALLOWED |= {command: {"names", "places", "verbs", "sources", "config", "candidates", "inventory"} for command in LIGHT}
ALLOWED["ls"] |= {"tasks"}
ALLOWED["estimate"] |= {"record", "train", "evaluate"}  # which say it
ALLOWED["learnkv"] = INSIDE - {"kernels", "config"}  # the public names


def module_of(path: Path) -> str:
    """kernels/attend.py -> learnkv.kernels.attend; learnkv/gates/__init__.py -> learnkv.gates"""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name if name.startswith("learnkv") else f"learnkv.{name}"


FILES = [*sorted((ROOT / "kernels").rglob("*.py")), *sorted(p for p in (ROOT / "learnkv").rglob("*.py") if p == p.resolve())]
MODULES = {module_of(path): path for path in FILES}


def area_of(module: str) -> str:
    """learnkv.gates.kvp -> gates; learnkv itself is an area too."""
    return module.split(".")[min(module.count("."), 1)]


def imports(path: Path, *, types: bool = True) -> set[str]:
    """Every dotted name that a file imports, wherever in it; without those for type checkers only where `types` is False."""
    names = set()
    waiting = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            waiting += ast.iter_child_nodes(node)
    return names


def own_module(name: str) -> str | None:
    """The module of ours that an imported name lies in: the longest that exists."""
    parts = name.split(".")
    return next((m for m in (".".join(parts[:n]) for n in range(len(parts), 0, -1)) if m in MODULES), None)


def test_the_table_names_every_area_and_no_other():
    assert {area_of(module) for module in MODULES} == set(ALLOWED)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_area_may(module):
    area = area_of(module)
    path = MODULES[module]
    found = {area_of(own) for name in imports(path) if (own := own_module(name)) not in (None, "learnkv")}
    found |= {name.split(".")[0] for name in imports(path, types=False)} & OUTSIDE
    assert found - ALLOWED[area] - {area} == set(), f"{area} may import {sorted(ALLOWED[area])}"


def test_kernels_are_imported_as_learnkv_kernels():
    """`import kernels` finds Hugging Face's package of that name, or nothing."""
    assert not {name for path in FILES for name in imports(path) if name.split(".")[0] in ("kernels", "recipes")}


def test_no_module_imports_itself_in_a_circle():
    graph = {module: {own_module(name) for name in imports(path, types=False)} - {None, module} for module, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_the_runtime_knows_no_method_by_name():
    from learnkv.methods import METHODS

    runtime = [ast.parse(path.read_text()) for module, path in MODULES.items() if area_of(module) == "runtime"]
    words = {node.value for tree in runtime for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not words & set(METHODS)


def test_commands_alone_print():
    printing = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing <= {f"learnkv.{command}" for command in (*COMMANDS, "__main__", "config")}
