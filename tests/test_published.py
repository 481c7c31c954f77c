"""Published weights become gates that score as their authors' modules do; another file is one clear error."""

import re

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from learnkv.checkpoint import load_gate, save_gate
from learnkv.models import describe
from learnkv.published import import_fast_kvzip, import_kvzap
from tests.born_parts import model_of, recorded

M, H, G, LAYERS = 32, 2, 2, 3  # of the tiny Llama


def fast_kvzip_layer(seed=0, sinks=5, width=4, hidden=M):
    """One layer as their gate.py names its weights."""
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))  # noqa: E731
    return {
        "k_base": draw(H, 1, sinks, width),
        "b": draw(H, 1, G).bfloat16(),
        "q_proj.weight": draw(H * G * width, hidden).bfloat16(),
        "q_proj.bias": draw(H * G * width).bfloat16(),
        "k_proj.weight": draw(H * width, hidden).bfloat16(),
        "q_norm.weight": 1 + draw(width),
        "k_norm.weight": 2 + draw(width),
    }


def their_score(layer, x):
    """[H, n] what their module gives for x [n, M]: the published inference, b added once."""
    w = {name: t.float() for name, t in layer.items()}
    width = w["q_norm.weight"].numel()
    rms = lambda v, gain: v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain  # noqa: E731
    q = rms((x @ w["q_proj.weight"].T + w["q_proj.bias"]).view(len(x), H, G, width), w["q_norm.weight"])
    k = rms((x @ w["k_proj.weight"].T).view(len(x), H, 1, width), w["k_norm.weight"])
    logit = (q * k).sum(-1) / width**0.5 + w["b"][:, 0]  # [n, H, G]
    base = torch.einsum("nhgd,hsd->nhgs", q, w["k_base"][:, 0]) / width**0.5
    return (1 / (1 + (base - logit[..., None]).exp().sum(-1))).mean(-1).T


@pytest.fixture
def fast_kvzip(tmp_path):
    layers = [fast_kvzip_layer(seed) for seed in range(LAYERS)]
    losses = {"loss": numpy.zeros((2, LAYERS)), "acc": numpy.ones(2, dtype=numpy.float32)}  # as their training leaves them beside it
    torch.save({"module": layers, **losses}, tmp_path / "q2_dim4_sink5.pt")
    return tmp_path / "q2_dim4_sink5.pt", layers


def test_a_published_fast_kvzip_gate_scores_as_its_authors_module(fast_kvzip, tmp_path):
    path, layers = fast_kvzip
    gate, trace = import_fast_kvzip(path, model_of()), recorded(40)
    assert (gate.config.width, gate.config.num_sinks, gate.base) == (4, 5, describe(model_of()))
    want = torch.stack([their_score(layer, x) for layer, x in zip(layers, trace.hidden, strict=True)])
    torch.testing.assert_close(gate.score_trace(trace), want, rtol=1e-5, atol=1e-6)
    save_gate(gate, tmp_path / "gate", {"imported": str(path)})
    assert torch.equal(load_gate(tmp_path / "gate", model_of()).score_trace(trace), gate.score_trace(trace))


@pytest.mark.parametrize("name", ["layers", "module_list"])
@pytest.mark.parametrize("width", [0, 6])
def test_a_published_kvzap_gate_scores_as_its_authors_module(tmp_path, width, name):
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(M, width), nn.GELU(), nn.Linear(width, H)) if width else nn.Linear(M, H) for _ in range(LAYERS)]
    save_file({f"{name}.{i}.{key}": t for i, module in enumerate(modules) for key, t in module.state_dict().items()}, tmp_path / "m")
    gate, trace = import_kvzap(tmp_path / "m", model_of()), recorded(40)
    assert gate.config.width == width
    with torch.no_grad():
        want = torch.stack([module(x).T for module, x in zip(modules, trace.hidden, strict=True)])
    torch.testing.assert_close(gate.score_trace(trace), want, rtol=1e-5, atol=1e-6)


def test_of_a_file_with_sliding_layers_the_others_are_taken(tmp_path):
    modules = [nn.Linear(M, H) for _ in range(4)]
    save_file({f"layers.{i}.{key}": t for i, module in enumerate(modules) for key, t in module.state_dict().items()}, tmp_path / "m")
    gate = import_kvzap(tmp_path / "m", model_of("gemma3"))
    for index, module in enumerate((modules[1], modules[3])):
        assert torch.equal(gate.last_weight[index], module.weight.T)


class Evil:
    def __reduce__(self):
        return print, ("it ran",)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"module": [fast_kvzip_layer()] * 5}, "holds 5 layers, .* has 3"),
        ({"module": [fast_kvzip_layer() | {"extra": torch.zeros(1)}] * 3}, r"its layer 0 holds \[.*'extra'.*\], not \["),
        (
            {"module": [fast_kvzip_layer(hidden=48)] * 3},
            r"q_proj.weight of its layer 0 becomes \(48, 16\), a fast_kvzip gate .* has \(32, 16\)",
        ),
        ({"module": [fast_kvzip_layer() | {"b": torch.zeros(3)}] * 3}, r"b of its layer 0 becomes \(3,\)"),
        ({"modules": [fast_kvzip_layer()] * 3}, "no list of layers under 'module'"),
        ({"module": [{"k_base": "text"}] * 3}, "no list of layers under 'module'"),
        ([1, 2], "no list of layers under 'module'"),
        ({"module": Evil()}, "no file of tensors"),
    ],
    ids=range(8),
)
def test_another_file_in_the_place_of_a_fast_kvzip_gate_is_one_clear_error(tmp_path, capsys, content, says):
    torch.save(content, tmp_path / "gate.pt")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "gate.pt")) + ".*" + says) as caught:
        import_fast_kvzip(tmp_path / "gate.pt", model_of())
    assert "\n" not in str(caught.value) and "it ran" not in capsys.readouterr().out


@pytest.mark.parametrize("size", [0, 100, -100])
def test_a_truncated_file_is_one_clear_error(fast_kvzip, size):
    path, _ = fast_kvzip
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="is no file of tensors") as caught:
        import_fast_kvzip(path, model_of())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [import_fast_kvzip, import_kvzap])
def test_a_missing_file_is_named(tmp_path, read):
    with pytest.raises(ValueError, match="nowhere is no file"):
        read(tmp_path / "nowhere", model_of())


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"lm_head.weight": torch.zeros(2)}, "holds lm_head.weight"),
        ({"layers.1.weight": torch.zeros(H, M)}, r"holds layers \[1\], some are missing"),
        ({f"layers.{i}.weight": torch.zeros(H, M) for i in range(3)}, r"its layer 0 holds \['weight'\], not \['bias', 'weight'\]"),
        (
            {f"layers.{i}.{key}": torch.zeros(shape) for i in range(3) for key, shape in (("weight", (4, M)), ("bias", (4,)))},
            r"weight of its layer 0 becomes \(32, 4\), a kvzap gate .* has \(32, 2\)",
        ),
    ],
    ids=range(4),
)
def test_another_file_in_the_place_of_a_kvzap_gate_is_one_clear_error(tmp_path, tensors, says):
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=says):
        import_kvzap(tmp_path / "m.safetensors", model_of())
    (tmp_path / "m.safetensors").write_bytes(b"hello")
    with pytest.raises(ValueError, match="truncated or no safetensors file"):
        import_kvzap(tmp_path / "m.safetensors", model_of())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda w: w.fill_(float("nan")), "holds numbers that are not finite"),
        (lambda w: w.to(torch.int8), "is strided int8 on cpu, where plain floating-point numbers belong"),
        (lambda w: w.to(torch.complex64), "is strided complex64 on cpu"),
        (lambda w: w.to_sparse(), "is sparse_coo float32 on cpu"),
    ],
)
def test_tensors_that_are_no_weights_are_refused_by_their_place(tmp_path, spoil, says):
    layers = [fast_kvzip_layer(seed) for seed in range(LAYERS)]
    layers[1]["k_norm.weight"] = spoil(layers[1]["k_norm.weight"])
    torch.save({"module": layers}, tmp_path / "gate.pt")
    with pytest.raises(ValueError, match=rf"gate\.pt: k_norm\.weight of its layer 1 {says}"):
        import_fast_kvzip(tmp_path / "gate.pt", model_of())


def test_a_layer_that_is_named_twice_is_refused(tmp_path):
    tensors = {f"layers.{i}.{name}": torch.zeros(shape) for i in range(LAYERS) for name, shape in (("weight", (H, M)), ("bias", (H,)))}
    save_file(tensors | {"layers.01.weight": torch.ones(H, M)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds weight of layer 1 twice"):
        import_kvzap(tmp_path / "model.safetensors", model_of())
