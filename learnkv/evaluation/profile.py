"""Profile of a model on prompts: where each head looks, what that would take to keep, and which budgets and allocators it suggests."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from learnkv.budgets import ALLOCATORS, Ratio
from learnkv.capture import Captured, capture, evictable_layers
from learnkv.counts import check_count
from learnkv.evaluation.compare import encode_prompt
from learnkv.evaluation.diagnosis import protected_mask
from learnkv.files import write_atomically
from learnkv.heuristics.oracle import Oracle
from learnkv.models import PreTrainedModel
from learnkv.observation import Observation, Slots
from learnkv.policy import Policy
from learnkv.prompts import Encoded, Prompt
from learnkv.prompts.prompt import Tokenizer
from learnkv.traces import targets
from learnkv.traces.measure import run, softmax_scales

BUDGETS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.03)
MOST_ROWS = 32  # of a question and its answer, evenly over them, whose attention is looked at one by one
LOCAL = 0.9  # a head is local where sinks and its last tokens hold as much of its attention (SimLayerKV's threshold, arXiv:2410.13846)
ENOUGH = 0.95  # of the attention to come that a suggested budget keeps at best
NEAR = 0.01  # of the attention to come: the simplest allocator that comes as near to the best is suggested


@dataclass(frozen=True)
class ProfileSettings:
    """What counts as a sink and as near."""

    num_sinks: int = 4  # first tokens that always stay
    num_recent: int = 16  # last tokens of the context that always stay
    num_local: int = 64  # last tokens, a row's own included, that are near to it

    def __post_init__(self) -> None:
        for name, least in (("num_sinks", 0), ("num_recent", 0), ("num_local", 1)):
            check_count(name, getattr(self, name))
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} counts tokens; give {least} or more")


@dataclass(frozen=True)
class Profile:
    """Means over prompts, each [layers][H] per KV head, over the query heads of its group and the rows of question and answer.

    sinks     share of a row's attention on the first num_sinks tokens
    local     share on its last num_local tokens that are no sinks
    entropy   of a row's attention, nats; e to the power of it is how many tokens it looks at
    top       share of the attention to come, beside the sinks', that the tenth of the context that gets most of it gets

    tokens    (fewest, most) of the contexts
    nbytes    what evictable layers hold per token
    coverage  allocator -> budget -> share of the attention to come, beside what is protected, that the oracle keeps: no method keeps more
    """

    sinks: list[list[float]]
    local: list[list[float]]
    entropy: list[list[float]]
    top: list[list[float]]
    prompts: int
    tokens: tuple[int, int]
    nbytes: float
    coverage: dict[str, dict[float, float]]
    settings: ProfileSettings

    @property
    def retrieval(self) -> list[list[bool]]:
        """[layers][H] heads that look further than sinks and near tokens; the others are local."""
        return [[s + near < LOCAL for s, near in zip(*rows, strict=True)] for rows in zip(self.sinks, self.local, strict=True)]

    def suggestions(self) -> list[str]:
        """One line each: a budget with an allocator, and what the heads are like."""
        heads = [head for layer in self.retrieval for head in layer]
        far = sum(heads)
        said = [budget_suggested(self.coverage, self.nbytes * self.tokens[1])]
        near = f"{len(heads) - far} of {len(heads)} KV heads are local: sinks and {self.settings.num_local} last tokens hold {LOCAL:.0%}"
        if far <= len(heads) / 2:
            return [*said, f"{near} of their attention; heads that stream once and for all suit this, duo_attention or headkv"]
        return [*said, f"{near} of their attention; the others look further, so that no head should stream by rule"]

    def cells(self) -> list[list[str]]:
        """Rows of cells: a header, then one line per layer, means over its heads."""
        header = ["layer", "sinks", "local", "far", "entropy", "top 10%", "retrieval heads"]
        figures = zip(self.sinks, self.local, self.entropy, self.top, self.retrieval, strict=True)
        return [header, *(layer_cells(layer, *of_layer) for layer, of_layer in enumerate(figures))]

    def coverage_cells(self) -> list[list[str]]:
        """Rows of cells: what the oracle keeps, a line per allocator and a column per budget."""
        budgets = list(next(iter(self.coverage.values())))
        header = ["the oracle keeps, at", *(f"{budget:.0%}" for budget in budgets)]
        return [header, *([name, *(f"{kept[b]:.1%}" for b in budgets)] for name, kept in self.coverage.items())]

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """profile.json with every figure, profile.png with the maps and the curves; their paths."""
        figures, picture = Path(folder) / "profile.json", Path(folder) / "profile.png"
        figures.parent.mkdir(parents=True, exist_ok=True)
        values = asdict(self) | {"retrieval": self.retrieval, "suggestions": self.suggestions()}
        write_atomically(figures, lambda to: to.write_text(json.dumps(values, indent=1) + "\n"))
        write_atomically(picture, self.draw)
        return figures, picture

    def draw(self, path: str | Path) -> None:
        """A map of layers and heads per figure, and what the oracle keeps over the budget, as PNG."""
        from matplotlib.figure import Figure  # a second to import, for pictures only

        maps = {"sinks": self.sinks, "local": self.local, "entropy, nats": self.entropy, "top 10%": self.top}
        figure = Figure(figsize=(16, 2.5 + 0.1 * len(self.sinks)), layout="constrained")
        *axes, curves = figure.subplots(1, len(maps) + 1, width_ratios=[1] * len(maps) + [2])
        for axis, (name, values) in zip(axes, maps.items(), strict=True):
            image = axis.imshow(values, aspect="auto", vmin=0, vmax=None if "nats" in name else 1)
            axis.set(title=name, xlabel="KV head", ylabel="layer")
            figure.colorbar(image, ax=axis)
        for name, kept in self.coverage.items():
            curves.plot(list(kept), list(kept.values()), marker="o", markersize=3, label=name)
        curves.set(title="attention to come that the oracle keeps", xlabel="budget, share of the context", xscale="log")
        budgets = list(next(iter(self.coverage.values())))
        curves.set_xticks(budgets, labels=[f"{budget:.0%}" for budget in budgets])
        curves.minorticks_off()
        curves.legend(fontsize="small")
        figure.savefig(path, dpi=150, format="png")


def layer_cells(
    layer: int, sinks: list[float], local: list[float], entropy: list[float], top: list[float], retrieval: list[bool]
) -> list[str]:
    s, near, nats, most = (sum(values) / len(values) for values in (sinks, local, entropy, top))
    return [
        str(layer),
        f"{s:.2f}",
        f"{near:.2f}",
        f"{1 - s - near:.2f}",
        f"{nats:.2f}",
        f"{most:.2f}",
        f"{sum(retrieval)} of {len(retrieval)}",
    ]


def budget_suggested(coverage: Mapping[str, Mapping[float, float]], nbytes: float) -> str:
    """The smallest budget at which an allocator keeps ENOUGH, with the first that is as good as the best there; nbytes of a full cache."""
    budgets = sorted(next(iter(coverage.values())))
    enough = [budget for budget in budgets if max(kept[budget] for kept in coverage.values()) >= ENOUGH]
    if not enough:
        return f"no budget up to {budgets[-1]:.0%} keeps {ENOUGH:.0%} of the attention to come, even for the oracle: evict little here"
    best = max(kept[enough[0]] for kept in coverage.values())
    name, kept = next((name, kept[enough[0]]) for name, kept in coverage.items() if kept[enough[0]] >= best - NEAR)
    size = f"{enough[0] * nbytes / 2**20:.1f} of {nbytes / 2**20:.1f} MiB for the longest prompt"
    return f"start at a budget of {enough[0]:g} with {name}: {kept:.0%} of the attention to come can be kept there, in {size}"


# ---- measured


@dataclass(frozen=True)
class Looks:
    """What one prompt shows; sinks, local, entropy, top [layers, H] float64, utility [layers, H, n] float32, nbytes per token."""

    sinks: Tensor
    local: Tensor
    entropy: Tensor
    top: Tensor
    utility: Tensor
    nbytes: float


@torch.no_grad()
def profile(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    settings: ProfileSettings | None = None,
    *,
    progress: Callable[[Sequence[Prompt]], Iterable[Prompt]] = iter,
) -> Profile:
    """The profile over all questions of the prompts; `progress` wraps their list, as tqdm does."""
    if not prompts:
        raise ValueError("profile got no prompts; give one or more")
    settings = settings or ProfileSettings()
    looks, kept, sizes = [], [], []
    for prompt in progress(prompts):
        encoded = encode_prompt(model, tokenizer, prompt)
        found = looks_of(model, encoded, settings)
        looks.append(found)
        kept.append(coverage_of(found.utility, encoded[0], settings))
        sizes.append(len(encoded[0].context))
    sinks, local, entropy, top = (
        torch.stack([getattr(found, name) for found in looks]).mean(0).tolist() for name in ("sinks", "local", "entropy", "top")
    )
    coverage = {name: {b: sum(of[name][b] for of in kept) / len(kept) for b in BUDGETS} for name in ALLOCATORS}
    return Profile(sinks, local, entropy, top, len(looks), (min(sizes), max(sizes)), looks[0].nbytes, coverage, settings)


def looks_of(model: PreTrainedModel, encoded: Sequence[Encoded], settings: ProfileSettings) -> Looks:
    """One prefill of the context, and each question with its answer over a copy of its cache."""
    layers, n = evictable_layers(model), len(encoded[0].context)
    scales, rows, utility = softmax_scales(model, layers), [], torch.zeros(())
    with capture(model, {"queries"}) as taken:
        cache, _ = run(model, encoded[0].context)
        nbytes = sum(cache.layers[i].keys.nbytes + cache.layers[i].values.nbytes for i in layers) / n
        for e in encoded:
            after = run(model, torch.cat([e.question, e.answer]), copy.deepcopy(cache))[0]
            keys = [after.layers[i].keys for i in layers]
            rows.append(torch.stack([figures_of(taken, i, k, n, s, settings) for i, k, s in zip(layers, keys, scales, strict=True)]))
            of_layers = [targets.utility(taken.queries[i], k, n, s) for i, k, s in zip(layers, keys, scales, strict=True)]
            utility = utility.to(keys[0].device) + torch.cat(of_layers)
    sinks, local, entropy = torch.stack(rows).mean(0).unbind(-1)  # [layers, H] each
    return Looks(sinks, local, entropy, top_share(utility[..., settings.num_sinks :]), utility.cpu(), nbytes)


def figures_of(taken: Captured, layer: int, keys: Tensor, num_tokens: int, scale: float, settings: ProfileSettings) -> Tensor:
    """[H, 3] float64 sinks, local, entropy of one layer, mean over rows and group; keys [1, H, S, D] of the context and the rows."""
    queries, H = taken.queries[layer], keys.shape[1]
    Q, T = queries.shape[1:3]
    per_head = keys[:, :, None].expand(-1, -1, Q // H, -1, -1).flatten(1, 2)
    chosen = torch.linspace(0, T - 1, min(T, MOST_ROWS)).round().long().tolist()
    found = []
    for row in chosen:
        at = num_tokens + row
        attention = targets.mass_of_rows(queries[:, :, row : row + 1], per_head, range(at, at + 1), scale, "sum")  # [1, Q, S]
        found.append(row_figures(attention[0], at, settings))
    return torch.stack(found).mean(0).view(H, Q // H, 3).mean(1).cpu()


def row_figures(attention: Tensor, position: int, settings: ProfileSettings) -> Tensor:
    """[Q, 3] float64 sinks, local and entropy of one row's attention [Q, S], which stands at `position`."""
    p = attention.double()
    near = max(settings.num_sinks, position + 1 - settings.num_local)
    entropy = torch.special.entr(p).sum(-1)
    return torch.stack([p[:, : settings.num_sinks].sum(-1), p[:, near : position + 1].sum(-1), entropy], -1)


def top_share(utility: Tensor) -> Tensor:
    """[layers, H] float64 share of the utility [layers, H, n] that the tenth of the tokens with most of it gets; 0 where there is none."""
    count = ceil(Fraction(utility.shape[-1], 10))
    most = utility.double().topk(count, -1).values.sum(-1)
    return (most / utility.double().sum(-1).clamp(min=torch.finfo(torch.float64).tiny)).cpu()


# ---- what could be kept


def coverage_of(utility: Tensor, encoded: Encoded, settings: ProfileSettings) -> dict[str, dict[float, float]]:
    """Allocator -> budget -> share of the utility [layers, H, n] of unprotected tokens that the oracle keeps."""
    found: dict[str, dict[float, float]] = {}
    for name, allocate in ALLOCATORS.items():
        policies = {b: Policy(Oracle(utility), Ratio(b), allocate, settings.num_sinks, settings.num_recent) for b in BUDGETS}
        found[name] = {b: share_kept(utility, chosen(policy), protected_mask(policy, encoded)) for b, policy in policies.items()}
    return found


def chosen(policy: Policy) -> Tensor:
    """[layers, H, n] bool what a policy of the oracle's keeps of a prompt that came in one prefill."""
    assert isinstance(policy.scorer, Oracle)
    utility = policy.scorer.utility
    observations = [bare_observation(layer, *utility.shape) for layer in range(len(utility))]
    return torch.cat(policy.select(observations))


def bare_observation(layer: int, num_layers: int, H: int, n: int) -> Observation:
    """A layer that holds n tokens of which nothing but the positions matters."""
    nothing, count = torch.zeros(1, H, n, 1), torch.tensor([n])
    slots, new = Slots.dense(nothing, nothing), torch.arange(n).expand(1, H, n)
    return Observation(layer, num_layers, count, count, new, slots, nothing[:, :, :0], torch.zeros_like(count), 1.0)


def share_kept(utility: Tensor, kept: Tensor, protected: Tensor) -> float:
    """Of the utility [layers, H, n] of tokens that are not protected [n], the share on kept ones [layers, H, n]; 1 where there is none."""
    free = utility.double().masked_fill(protected, 0)
    total = free.sum()
    return float((free * kept).sum() / total) if total > 0 else 1.0
