"""What learnkv's own source says, read without importing it: an import takes torch, and seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A module of learnkv as text.

    definitions  functions, classes and constants at its top
    imports      name -> (module, name there), which is "" for a module itself
    """

    lines: list[str]
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)

    def text(self, node: ast.stmt) -> str:
        """The lines of a definition, with decorators and the comment at its end."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        return "\n".join(self.lines[first - 1 : node.end_lineno])


@cache
def read(module: str) -> Source:
    """The source of a module of learnkv."""
    path = Path(__file__).parent.joinpath(*module.split(".")[1:])
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    source = Source(text.splitlines())
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            source.imports.update({a.asname or a.name: (f"{node.module}", a.name) for a in node.names})
        elif isinstance(node, ast.Import):
            source.imports.update({a.asname or a.name: (a.name, "") for a in node.names})
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            source.definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            source.definitions.update({t.id: node for t in targets if isinstance(t, ast.Name)})
    return source


def found(module: str, name: str) -> tuple[str, ast.stmt | None]:
    """(module of learnkv, definition there) of a name as `module` knows it; no definition where it is not learnkv's."""
    source = read(module)
    home, there = source.imports.get(name, ("", ""))
    if there and home.partition(".")[0] == "learnkv":
        return found(home, there)
    return module, source.definitions.get(name)


# ---- the keys of a command


def keys(module: str) -> dict[str, list[str]]:
    """Every key=value that a command reads, by dotted name as `config.keys` gives it, with the values that it is limited to, [] for any.

    module  learnkv.train, whose TrainCommand it is
    """
    (schema,) = [name for name in read(module).definitions if name.endswith("Command")]
    return dict(fields(module, schema))


def fields(module: str, name: str, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Those of a dataclass, sections opened."""
    home, node = found(module, name)
    assert isinstance(node, ast.ClassDef), f"{name} of {module} is no class of learnkv"
    for base in node.bases:
        yield from fields(home, ast.unparse(base), prefix)
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            key = f"{prefix}{line.target.id}"
            if section := section_of(home, line.annotation):
                yield from fields(home, section, f"{key}.")
            else:
                yield key, choices(home, line.annotation)


def section_of(module: str, annotation: ast.expr) -> str:
    """The dataclass that an annotation names, "" for none."""
    if not isinstance(annotation, ast.Name):
        return ""
    node = found(module, annotation.id)[1]
    return annotation.id if isinstance(node, ast.ClassDef) else ""


def choices(module: str, annotation: ast.expr) -> list[str]:
    """The values of a Literal, or of a name for one; true and false for a bool."""
    if isinstance(annotation, ast.Name):
        if annotation.id == "bool":
            return ["true", "false"]
        home, node = found(module, annotation.id)
        return choices(home, node.value) if isinstance(node, ast.Assign) else []
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        values = ast.literal_eval(annotation.slice)
        return [str(value) for value in (values if isinstance(values, tuple) else (values,))]
    return []


def knobs(method: str) -> dict[str, list[str]]:
    """Those of the `gate` section of a method with weights, as `keys` gives them; {} for any other."""
    for name in read("learnkv.gates").imports:
        home, node = found("learnkv.gates", name)
        told = constants(node) if isinstance(node, ast.ClassDef) else {}
        if told.get("METHOD") == repr(method):
            return dict(fields(home, told["Config"], "gate."))
    return {}


def constants(node: ast.ClassDef) -> dict[str, str]:
    """Name -> source of what a class sets in its body."""
    lines = [line for line in node.body if isinstance(line, ast.Assign)]
    return {target.id: ast.unparse(line.value) for line in lines for target in line.targets if isinstance(target, ast.Name)}


# ---- the methods


@dataclass(frozen=True)
class MethodLine:
    """A line of the registry of methods: paper is an arXiv id, "" for a control of ours."""

    name: str
    paper: str
    trained: bool


def methods() -> list[MethodLine]:
    """METHODS of learnkv.methods, in its order."""
    return [method_line(name, call) for name, call in entries("learnkv.methods", "METHODS").items()]


def models() -> list[str]:
    """The names in BUNDLED of learnkv.models."""
    return list(entries("learnkv.models", "BUNDLED"))


def entries(module: str, name: str) -> dict[str, ast.expr]:
    """A dict at the top of a module: its keys, and its values as they are written."""
    node = read(module).definitions[name]
    assert isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
    return {ast.literal_eval(key): value for key, value in zip(node.value.keys, node.value.values, strict=True) if key is not None}


def method_line(name: str, call: ast.expr) -> MethodLine:
    assert isinstance(call, ast.Call)
    papers = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "paper")]
    return MethodLine(name, str(ast.literal_eval(papers[0])) if papers else "", is_trained(ast.unparse(call.func)))


def is_trained(kind: str) -> bool:
    """What a class of learnkv.methods, or the nearest of those it extends, says."""
    node = read("learnkv.methods").definitions[kind]
    assert isinstance(node, ast.ClassDef)
    said = [
        line.value
        for line in node.body
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "trained" and line.value is not None
    ]
    return bool(ast.literal_eval(said[0])) if said else any(is_trained(ast.unparse(base)) for base in node.bases)
