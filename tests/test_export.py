"""An exported press scores as its gate is served, fits its model only, and never takes another file's place."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from learnkv import config, export
from learnkv.budgets import Ratio
from learnkv.checkpoint import save_gate
from learnkv.export import ExportCommand, export_press
from learnkv.gates import GATES
from learnkv.gates.base import Gate
from learnkv.gates.dms import DMSConfig
from learnkv.gates.duo_attention import DuoAttentionConfig
from learnkv.gates.judge_q import JudgeQ
from learnkv.gates.kvp import KVPConfig
from learnkv.gates.lookaheadkv import LookaheadKVConfig
from learnkv.gates.probe_tokens import ProbeTokensConfig
from learnkv.gates.trimkv import TrimKVConfig
from learnkv.methods import METHODS
from learnkv.models import describe
from learnkv.presses.bundle import PRESSES
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from tests.born_parts import KNOBS
from tests.kvpress_stub import stub
from tests.probe_parts import served
from tests.tiny_models import prompt, tiny

SMALL: dict[str, object] = {name: GATES[name].Config(**knobs) for name, knobs in KNOBS.items()} | {
    "kvp": KVPConfig(branch_width=6, width=10),
    "trimkv": TrimKVConfig(width=6, bias=3.0),
    "dms": DMSConfig(),
    "duo_attention": DuoAttentionConfig(),
    "lookaheadkv": LookaheadKVConfig(num_tokens=5, rank=2, kernel_size=3),
    "judge_q": ProbeTokensConfig(num_tokens=5, kernel_size=3),
}
MORE = [  # what a gate's knobs change in its press
    ("kvp", KVPConfig(branch_width=6, width=10, positions="table", max_positions=20, shared=True, unrotate=False, depth=1)),
    ("kvp", KVPConfig(branch_width=6, width=10, positions="none", inputs=("values",), pooling=0.0)),
    ("kvp", KVPConfig(width=10, inputs=())),
    ("kvzap", GATES["kvzap"].Config(width=0)),
    ("judge_q", ProbeTokensConfig(num_tokens=4, kernel_size=0)),
]
METHOD_CONFIGS = [*SMALL.items(), *MORE]


@cache
def model(family: str = "llama") -> PreTrainedModel:
    return tiny(family).requires_grad_(False)


def made(name: str, knobs: object = None, family: str = "llama") -> Gate:
    """A gate whose every weight and constant matters."""
    torch.manual_seed(0)
    gate = GATES[name](knobs or SMALL[name], describe(model(family)))
    gate.meet(model(family))
    for weight in [*gate.parameters(), *gate.buffers()]:
        if weight.numel() and weight is not getattr(gate, "frequencies", None):
            weight.data += 0.1 * torch.randn(weight.shape).abs()
    return gate.eval().requires_grad_(False)


def loaded(gate: Gate | Path, folder: Path) -> ModuleType:
    """The exported file, imported where kvpress is the stub."""
    path = export_press(gate, folder / "a_press.py")
    spec = importlib.util.spec_from_file_location("a_press", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    with stub():
        sys.modules["a_press"] = found  # dataclasses look their module up
        spec.loader.exec_module(found)
    return found


def pressed(press: object, ids: Tensor, family: str = "llama") -> DynamicCache:
    """The cache after a prompt [n] was read under the press."""
    held = DynamicCache()
    with torch.no_grad(), press(model(family)):  # type: ignore[operator]
        model(family).model(ids[None], past_key_values=held)
    return held


def noted_scores(module: ModuleType, ids: Tensor, family: str = "llama") -> Tensor:
    """[layers, H, n] what the press scores, without what it protects."""
    noted: list[Tensor] = []

    def note(scores: Tensor, num_sinks: int, num_recent: int) -> Tensor:
        noted.append(scores)
        return scores

    module.marked = note  # type: ignore[attr-defined]
    pressed(module.Press(0.5), ids, family)
    return torch.cat(noted)


@pytest.mark.parametrize("n", [41, 64])
@pytest.mark.parametrize(("name", "knobs"), METHOD_CONFIGS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(METHOD_CONFIGS)])
def test_an_exported_press_scores_a_prompt_as_the_gate_is_served(name, knobs, n, tmp_path):
    gate, ids = made(name, knobs), prompt(n)[0]
    want = torch.cat(served(gate, ids, model()))
    assert want.std() > 1e-4, "scores that say something"
    torch.testing.assert_close(noted_scores(loaded(gate, tmp_path), ids), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["kvp", "locret", "judge_q", "lookaheadkv", "dms"])
def test_a_model_with_norms_on_its_queries_is_scored_alike(name, tmp_path):
    gate, ids = made(name, family="qwen3"), prompt(50)[0]
    want = torch.cat(served(gate, ids, model("qwen3")))
    torch.testing.assert_close(noted_scores(loaded(gate, tmp_path), ids, "qwen3"), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(set(SMALL) - {"duo_attention"}))
def test_the_press_keeps_what_the_cache_keeps_of_one_budget_for_all_heads(name, tmp_path):
    gate, ids = made(name), prompt(60)[0]
    held = pressed(loaded(gate, tmp_path).Press(0.5, num_sinks=2, num_recent=5), ids)
    with torch.no_grad(), attach(model()):
        cache = EvictionCache(METHODS[name](30, gate=gate, allocate="uniform", num_sinks=2, num_recent=5), model())
        model()(ids[None], cache=cache)
    for layer, pages in zip(held.layers, cache.held_pages(), strict=True):
        for ours, theirs in ((pages.slots().keys, layer.keys), (pages.slots().values, layer.values)):
            torch.testing.assert_close(in_order(ours), in_order(theirs), rtol=1e-4, atol=1e-5)


def in_order(x: Tensor) -> Tensor:
    """[B, H, k, D] in the order of the first dimension's values."""
    return x.gather(2, x[..., :1].argsort(2).expand_as(x))


@pytest.mark.parametrize("sparsity", [0.5, 0.8])
def test_full_heads_keep_what_learnkv_gives_them(sparsity, tmp_path):
    gate, ids = made("duo_attention", DuoAttentionConfig(sparsity=sparsity)), prompt(60)[0]
    module, noted = loaded(gate, tmp_path), []
    press = module.Press(0.7, num_sinks=2, num_recent=5)
    forward_hook = press.forward_hook

    def note(attention, *rest):
        forward_hook(attention, *rest)
        noted.append(60 - torch.bincount(attention.masked_key_indices[1], minlength=2))

    press.forward_hook = note
    pressed(press, ids)
    with torch.no_grad(), attach(model()):
        cache = EvictionCache(METHODS["duo_attention"](18, gate=gate, num_sinks=2, num_recent=5), model())
        model()(ids[None], cache=cache)
    assert torch.equal(torch.stack(noted), cache.lengths()[:, 0].long())


def test_a_ratio_of_0_keeps_everything(tmp_path):
    assert {layer.get_seq_length() for layer in pressed(loaded(made("judge_q"), tmp_path).Press(), prompt(30)[0]).layers} == {30}


def test_rows_leave_the_model_and_its_output_as_they_were(tmp_path):
    ids, press = prompt(30), loaded(made("lookaheadkv"), tmp_path).Press(0.5)
    with torch.no_grad():
        plain = model()(ids).logits
        with press(model()):
            first = model()(ids).logits
            longer = model().generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(first, plain) and torch.equal(model()(ids).logits, plain)
    assert longer.shape[1] == 34
    assert not any(m._forward_hooks for m in model().modules())


def test_every_gate_has_a_press():
    assert set(PRESSES) == set(GATES)


@pytest.mark.parametrize("name", sorted(PRESSES))
def test_a_press_protects_as_the_method_does(name, tmp_path):
    press = loaded(made(name), tmp_path).Press()
    assert (press.num_sinks, press.num_recent) == (METHODS[name].num_sinks, METHODS[name].num_recent)


@pytest.mark.parametrize("name", sorted(PRESSES))
def test_the_file_needs_nothing_of_learnkv(name, tmp_path):
    text = export_press(made(name), tmp_path / "it.py").read_text()
    nodes = list(ast.walk(ast.parse(text)))
    imported = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names} | {
        n.module for n in nodes if isinstance(n, ast.ImportFrom)
    }
    outside = {str(name).partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert outside <= {"torch", "kvpress", "transformers", "safetensors"}


# ---- what cannot be


def test_a_model_of_another_shape_is_refused_with_both_sides(tmp_path):
    other = tiny("llama", num_attention_heads=8, num_key_value_heads=4)
    for name in ("kvp", "judge_q"):
        press = loaded(made(name), tmp_path).Press(0.5)
        with pytest.raises(ValueError, match=f"this {name} gate .* num_kv_heads 2 against 4, num_query_heads 4 against 8"), press(other):
            pass


def test_sliding_layers_are_refused(tmp_path):
    hybrid = tiny("gemma3")
    press = loaded(GATES["kvzap"](SMALL["kvzap"], describe(hybrid)), tmp_path).Press(0.5)
    with pytest.raises(ValueError, match="Gemma3ForCausalLM has 2 layers of a sliding window"), press(hybrid):
        pass
    press = loaded(JudgeQ(ProbeTokensConfig(), describe(hybrid)), tmp_path).Press(0.5)
    with pytest.raises(ValueError, match="2 layers of a sliding window, whose cache"), press(hybrid):
        pass


@dataclass(frozen=True)
class Parts:
    """A layer's tensors as a wrapper may show them."""

    hidden: int
    keys: int
    positions: range

    def score(self, press: object) -> Tensor:
        keys = torch.randn(1, 2, self.keys, 8)
        at = {"cache_position": torch.tensor(self.positions)}
        attention = model().model.layers[1].self_attn
        return press.score(attention, torch.randn(1, self.hidden, 32), keys, keys, None, at)  # type: ignore[attr-defined]


def test_a_wrapper_that_shows_parts_is_refused(tmp_path):
    press = loaded(made("kvp"), tmp_path).Press(0.5)
    with pytest.raises(ValueError, match="has not met its model"):
        Parts(9, 9, range(9)).score(press)
    press.post_init_from_model(model())
    assert Parts(9, 9, range(9)).score(press).shape == (1, 2, 9)
    with pytest.raises(ValueError, match="4 keys, 4 hidden states and 9 positions"):
        Parts(4, 4, range(9)).score(press)
    with pytest.raises(ValueError, match="tokens 9 to 9; it scores whole prompts"):
        Parts(1, 1, range(9, 10)).score(press)


@pytest.mark.parametrize("name", ["fast_kvzip", "kvzap", "locret"])
def test_a_gate_of_single_tokens_scores_those_of_a_decoding_step_without_protection(name, tmp_path):
    press = loaded(made(name), tmp_path).Press(0.5)
    press.post_init_from_model(model())
    assert Parts(2, 2, range(9, 11)).score(press).max() < 1e30


# ---- the command


def test_the_command_writes_a_press_and_says_how_to_use_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gate = made("kvzap")
    save_gate(gate, Path("gate"), {})
    for arguments in (["gate=gate"], ["gate=gate"]):  # a second time over the first
        assert config.main(export.run, ExportCommand, arguments) == 0
    assert re.search(r"^press: kvzap_press.py, 0.0 MiB", capsys.readouterr().out, re.MULTILINE)
    assert Path("kvzap_press.py").read_text().startswith('"""A press for kvpress')
    assert torch.equal(noted_scores(loaded(gate, tmp_path), prompt(50)[0]), noted_scores(loaded(Path("gate"), tmp_path), prompt(50)[0]))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["to=a.py"], "gate= is missing"),
        (["gate=nowhere"], "nowhere holds no gate.safetensors"),
        (["gate=gate", "to=press.txt"], "press.txt cannot be imported"),
        (["gate=gate", "to=my-press.py"], "my-press.py cannot be imported"),
        (["gate=gate", "to=mine.py"], "mine.py is there and was not exported by learnkv; give another path, or overwrite=true"),
        (["gate=gate", "to=folder.py"], "folder.py is a folder"),
        (["gate=gate", "too=a.py"], "too"),
    ],
    ids=range(7),
)
def test_a_mistake_is_one_line_and_leaves_files_alone(arguments, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_gate(made("kvzap"), Path("gate"), {})
    Path("mine.py").write_text("print('mine')\n")
    Path("folder.py").mkdir()
    assert config.main(export.run, ExportCommand, arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert Path("mine.py").read_text() == "print('mine')\n" and not Path("a.py").exists()


@pytest.mark.parametrize("name", ["class.py", "None.py", "torch.py", "kvpress.py", "json.py", "\ufb01.py"])
def test_a_name_that_import_would_take_for_another_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"kvp_press\.py for one"):
        export_press(made("kvp"), tmp_path / name)


@pytest.mark.parametrize("name", ['a"""b', "C:\\Users\\x", "a\0b", "ends with \\"])
def test_whatever_a_model_is_called_the_file_is_python(tmp_path, name):
    gate = made("kvp")
    gate.base = replace(gate.base, name=name)
    tree = ast.parse(export_press(gate, tmp_path / "it.py").read_text())
    assert name in ast.get_docstring(tree)


def test_another_file_is_replaced_where_that_was_asked(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("print('mine')\n")
    export_press(made("kvzap"), path, overwrite=True)
    assert path.read_text().startswith('"""A press')


def test_a_gate_without_a_press_is_refused_by_name(tmp_path):
    class Other(JudgeQ):
        METHOD = "other"

    with pytest.raises(ValueError, match="a other gate has no press for kvpress; known: dms, "):
        export_press(Other(ProbeTokensConfig(), describe(model())), tmp_path / "it.py")
    with pytest.raises(ValueError, match="gate is a Ratio, no gate"):
        export_press(Ratio(0.5), tmp_path / "it.py")  # type: ignore[arg-type]


def test_the_file_compiles_without_learnkv_on_the_path(tmp_path):
    path = export_press(made("kvp"), tmp_path / "it.py")
    subprocess.run([sys.executable, "-I", "-m", "py_compile", str(path)], check=True)
