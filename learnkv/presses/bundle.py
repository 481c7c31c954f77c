"""A gate as one file of Python: its method's press, what that takes from learnkv, and the weights."""

from __future__ import annotations

import ast
import base64
import json
import sys
import textwrap
from dataclasses import asdict, dataclass, field
from keyword import iskeyword
from pathlib import Path
from pprint import pformat
from unicodedata import normalize

from safetensors.torch import save

from learnkv.checkpoint import SHAPE, load_gate, tensors_of
from learnkv.files import write_atomically
from learnkv.gates.base import Gate, describe_geometry
from learnkv.names import given, nearest
from learnkv.sources import read
from learnkv.version import __version__

PRESSES = {  # method -> module of learnkv.presses, class
    "kvp": ("kvp", "KVPPress"),
    "fast_kvzip": ("fast_kvzip", "FastKVzipPress"),
    "foresight": ("foresight", "ForesightPress"),
    "kvzap": ("kvzap", "KVzapPress"),
    "locret": ("locret", "LocretPress"),
    "trimkv": ("trimkv", "TrimKVPress"),
    "dms": ("dms", "DMSGatePress"),
    "duo_attention": ("duo_attention", "DuoAttentionGatePress"),
    "lookaheadkv": ("probe_tokens", "LookaheadKVPress"),
    "judge_q": ("probe_tokens", "JudgeQPress"),
}
NEEDED = ("torch", "transformers", "kvpress", "safetensors")
MARK = '"""A press for kvpress, exported by learnkv '

HEAD = '''
{mark}{version}: a {method} gate for {name}.

    from {module} import Press

    with Press(compression_ratio=0.5)(model):
        model.model(input_ids, past_key_values=cache)

{about}

compression_ratio is the share of the tokens that go; num_sinks and num_recent are the first and last tokens of a prompt that stay before
all others.  For models of {geometry}.
Needs torch, transformers and kvpress 0.5, not learnkv.  The weights are in the last lines.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

{imports}


{parts}


class Press({kind}):
    __doc__ = {kind}.__doc__
    learned = Learned(
        method={method!r},
        config={config},
        base={base},
        encoded="""
{encoded}""",
    )
'''


def export_press(gate: Gate | str | Path, path: str | Path, *, overwrite: bool = False) -> Path:
    """Writes a gate as a press of kvpress into one file, which needs neither learnkv nor another file; returns its path.

    gate       a gate, or its folder
    path       the file; an earlier export there is replaced, and anything else only if `overwrite`
    """
    path = Path(path)
    refuse_path(path, overwrite)
    content = press_text(load_gate(gate) if isinstance(gate, str | Path) else gate, path.stem)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda to: to.write_text(content))
    return path


def refuse_path(path: Path, overwrite: bool) -> None:
    """Raises a ValueError for a name that cannot be imported, and for a file of another making."""
    name = path.stem
    if path.suffix != ".py" or not name.isidentifier() or iskeyword(name) or normalize("NFKC", name) != name:
        raise ValueError(f"{path} cannot be imported; name the file as a module of Python, kvp_press.py for one")
    if name in NEEDED or name in sys.stdlib_module_names:
        raise ValueError(f"{path} would be imported in the place of {name}, which it may need; name it otherwise, kvp_press.py for one")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file")
    if path.exists() and not overwrite and not path.read_bytes().startswith(MARK.encode()):
        raise ValueError(f"{path} is there and was not exported by learnkv; give another path, or overwrite=true")


def press_text(gate: Gate, module: str) -> str:
    """The file, to be imported as `module`."""
    if not isinstance(gate, Gate):
        raise ValueError(f"gate is {given(gate)}, no gate; give one that learnkv.load_gate returns")
    if gate.METHOD not in PRESSES:
        raise ValueError(f"a {gate.METHOD} gate has no press for kvpress; {nearest('', PRESSES)}")
    source, kind = PRESSES[gate.METHOD]
    bundle = Bundle()
    bundle.take(f"learnkv.presses.{source}", kind)
    bundle.take("learnkv.presses.common", "Learned")
    return HEAD.lstrip().format(
        mark=MARK,
        version=__version__,
        method=gate.METHOD,
        name=json.dumps(gate.base.name)[1:-1],  # a name may hold quotes and backslashes
        module=module,
        about=about(source, kind),
        geometry=describe_geometry(gate.base.num_layers, gate.base.num_kv_heads, gate.base.head_dim),
        imports=bundle.import_lines(),
        parts="\n\n\n".join(bundle.parts.values()),
        kind=kind,
        config=literal(gate.knobs()),
        base=literal({name: value for name, value in asdict(gate.base).items() if name in ("name", "weights_hash", *SHAPE)}),
        encoded=base64.encodebytes(save(tensors_of(gate))).decode(),
    )


def about(module: str, kind: str) -> str:
    """The docstring of a class of learnkv.presses."""
    node = read(f"learnkv.presses.{module}").definitions[kind]
    assert isinstance(node, ast.ClassDef)
    return ast.get_docstring(node) or ""


def literal(values: dict[str, object]) -> str:
    """A dict as it stands in the file."""
    return textwrap.indent(pformat(values, sort_dicts=False, width=120), " " * 8).lstrip()


# ---- the code, joined from learnkv's modules


@dataclass
class Bundle:
    """Definitions out of learnkv, each after all that it names, and what they import from elsewhere."""

    homes: dict[str, str] = field(default_factory=dict)  # name -> module
    parts: dict[str, str] = field(default_factory=dict)  # name -> source
    imports: set[tuple[str, str, str]] = field(default_factory=set)  # (module, name there, name)

    def take(self, module: str, name: str) -> None:
        """A name as `module` knows it, with all that hangs on it; a name that it does not know is local or Python's own."""
        source = read(module)
        if name in source.imports:
            home, there = source.imports[name]
            assert there in ("", name), f"{module} gives {there} of {home} another name"
            if home.partition(".")[0] == "learnkv":
                self.take(home, name)
            else:
                self.imports.add((home, there, name))
        elif name in source.definitions and self.homes.setdefault(name, module) == module and name not in self.parts:
            node, self.parts[name] = source.definitions[name], ""
            for used in {n.id: None for n in ast.walk(node) if isinstance(n, ast.Name)}:
                self.take(module, used)
            del self.parts[name]  # it goes behind what it names
            self.parts[name] = source.text(node)
        else:
            assert self.homes.get(name, module) == module, f"{name} is another thing in {module} than in {self.homes[name]}"

    def import_lines(self) -> str:
        """Modules first, then names, each in order."""
        modules = sorted(f"import {home}" + (f" as {name}" if name != home else "") for home, there, name in self.imports if not there)
        homes = sorted({home for home, there, _ in self.imports if there})
        names = {home: ", ".join(sorted(name for at, there, name in self.imports if there and at == home)) for home in homes}
        return "\n".join([*modules, *(f"from {home} import {names[home]}" for home in homes)])
