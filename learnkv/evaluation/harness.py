"""learnkv's model of lm-evaluation-harness (lm-eval 0.4.13): both kinds of its requests, log-likelihoods too, are answered after eviction.

lm-eval scores a continuation in one forward over context and continuation, in which nothing can be evicted: with a cache for `generate`
alone, MMLU, ARC, HellaSwag and BoolQ have the full cache's figures at every budget.  Here each request is answered in two steps:
all of the context but its last token is run and evicted from, then that token and what follows it meet what was kept.

In lm-eval the whole prompt is the context, so that the question stands in what is compressed (`question_in_prefix`, as in the rows of
`learnkv.evaluate` with the question inside).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import cast, get_type_hints

import torch
from lm_eval.api.model import CacheHook
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import simple_parse_args_string
from torch import Tensor
from tqdm import tqdm

from learnkv.capture import decoder_of
from learnkv.checkpoint import load_gate
from learnkv.evaluation.contenders import Contender, contenders_of, entries_of
from learnkv.evaluation.rows import budget_of
from learnkv.models import DTYPES, PreTrainedModel, PreTrainedTokenizerBase, load_model, weights_hash
from learnkv.names import unknown
from learnkv.policy import Policy
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from learnkv.typed import fits
from learnkv.version import __version__

Request = tuple[tuple[str, str] | None, list[int], list[int]]  # texts (None for a window of a rolled text), context, continuation
Answer = tuple[float, bool]  # log-likelihood in nats, whether every token was the most likely one


@dataclass(frozen=True)
class Eviction:
    """What is evicted, and when: learnkv's own part of `--model_args`.

    method         as in `evaluate.methods`: snapkv, "snapkv(kernel_size=5)+adaptive", kvp:checkpoints/runs/kvp; "full" evicts nothing
    gate           folder of a gate, instead of `method`
    budget         below 1 the fraction of the context that stays, else tokens per KV head; none for "full"
    num_sinks      first tokens that always stay
    num_recent     last tokens of the context that always stay
    decode         whether a generated answer is evicted from as well, so that the budget holds to its end
    rolling_chunk  tokens of a rolled text between two evictions
    """

    method: str = ""
    gate: str = ""
    budget: float | None = None
    num_sinks: int = 4
    num_recent: int = 16
    decode: bool = False
    rolling_chunk: int = 256

    def __post_init__(self) -> None:
        if bool(self.method) == bool(self.gate):
            given = f"method={self.method} and gate={self.gate} both name one" if self.method else "neither method nor gate is given"
            raise ValueError(f"what evicts? {given}; give method=snapkv, or gate=FOLDER, or method=full for the full cache")
        if (self.budget is None) != (self.method == "full"):
            wanted = "needs a budget: budget=0.2, or tokens per KV head" if self.budget is None else "evicts nothing; drop budget"
            raise ValueError(f"{f'method={self.method}' if self.method else f'gate={self.gate}'} {wanted}")
        if self.rolling_chunk < 1:
            raise ValueError(f"rolling_chunk={self.rolling_chunk} counts tokens; give 1 or more")
        if self.method:
            entries_of([self.method])
        if self.budget is not None:
            budget_of(self.budget)

    def contender(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Contender:
        """The method or gate, ready for the model; raises ValueError where it cannot be evaluated by itself."""
        text = f"{load_gate(self.gate, model).METHOD}:{self.gate}" if self.gate else self.method
        found = contenders_of([text], model, tokenizer, self.num_sinks, self.num_recent, always=())
        if len(found) > 1:
            raise ValueError(f"method {text} names {len(found)} gates; lm-eval evaluates one at a time: give one folder")
        if found[0].scorer == "oracle":
            raise ValueError("method oracle knows the attention to come, and lm-eval's requests do not; take another method")
        return found[0]

    def policy(self, contender: Contender) -> Policy | None:
        """The policy at the budget, None for the full cache."""
        return None if self.budget is None else contender.at(budget_of(self.budget))


@register_model("learnkv")
class EvictionLM(HFLM):
    """A frozen model that answers lm-eval's requests after eviction; `--model learnkv` once this module is imported.

    Log-likelihood: all of a context but its last token is prefilled and evicted from, once for all its continuations; each of those is then
    teacher-forced after that last token, and none of it is evicted.  A context of one token (lm-eval's prefix token, where the context is
    empty) leaves nothing to evict.  A context that is too long loses its first tokens, as in HFLM.

    Rolling log-likelihood: the first window of a text, mostly the only one, has a context of one token, and nothing would be evicted.  So a
    window is read as a stream: in chunks of `rolling_chunk` tokens, evicting after each, to the budget of what was read so far.  A
    text that one chunk holds is not evicted from.

    Generation: the prompt as above, then the answer from its last token on; with `decode` the policy evicts while it is generated.

    Differs from HFLM: probabilities are in float32 whatever the model's type; nothing is asked of the hub for a bundled model or a folder.

    pretrained  bundled model, hub id or folder, as `learnkv.load_model` takes it
    eviction    what is evicted
    dtype       "float32", "bfloat16" or "float16", of model and cache
    The others are HFLM's.  A max_length below the model's own leaves positions to methods that run rows after a context, as KVzip does.
    """

    def __init__(
        self,
        pretrained: str,
        eviction: Eviction,
        *,
        dtype: str = "float32",
        device: str = "cuda:0",
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: dict | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES)
        self._model, self.loaded_tokenizer = load_model(pretrained, DTYPES[dtype])
        super().__init__(
            pretrained,
            backend="causal",
            device=device,  # HFLM takes the CPU where this is no device of the machine
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_length=max_length,
            add_bos_token=add_bos_token,
            prefix_token_id=prefix_token_id,
            think_end_token=think_end_token,
            enable_thinking=enable_thinking,
            chat_template_args=chat_template_args,
        )
        contender = eviction.contender(self.model, self.loaded_tokenizer)
        self.eviction, self.policy = eviction, eviction.policy(contender)
        EvictionCache(self.policy, self.model)  # what a policy or model can't do is said here, not at the first request
        self.protocol = self.protocol_of(contender)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> EvictionLM:
        """The model of `--model_args` as one text; see `create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None) -> EvictionLM:
        """The model of `--model_args`, the fields of Eviction among them, and of what lm-eval adds of its own command line.

        Raises ValueError with the nearest names for an unknown argument, and for a value of the wrong type.
        """
        added = {name: value for name, value in (additional_config or {}).items() if value is not None}
        for name in added.keys() & arg_dict.keys():
            raise ValueError(f"{name}={arg_dict[name]!r} stands in the model's arguments, and lm-eval has its own --{name}; use that")
        given, own = dict(arg_dict) | added, {field.name for field in fields(Eviction)}
        check_arguments(given, {**get_type_hints(Eviction), **constructor_hints(cls)})
        if "pretrained" not in given:
            raise ValueError("no model is named; give pretrained=smollm2-135m, a hub id or a folder")
        eviction = Eviction(**{name: value for name, value in given.items() if name in own})
        return cls(eviction=eviction, **{name: value for name, value in given.items() if name not in own})

    # ---- HFLM's steps of loading: model and tokenizer are there before

    def _get_config(self, pretrained: str, **loading: object) -> None:
        self._config = self._model.config

    def _create_tokenizer(self, pretrained: str, tokenizer: object, **loading: object) -> None:
        self.tokenizer = self.loaded_tokenizer

    def _create_model(self, pretrained: str, **loading: object) -> None:
        self._model.to(self.device)

    # ---- what ran

    def protocol_of(self, contender: Contender) -> dict[str, object]:
        """All that decides the figures beside lm-eval's own settings."""
        budget_form = None if self.eviction.budget is None else "ratio" if self.eviction.budget < 1 else "tokens"
        return asdict(self.eviction) | {
            "learnkv": __version__,
            "method": contender.method,
            "allocator": contender.allocator,
            "gate": contender.run,
            "gate_hash": contender.gate,
            "budget_form": budget_form,
            "num_sinks": None if self.policy is None else self.policy.num_sinks,
            "num_recent": None if self.policy is None else self.policy.num_recent,
            "question_in_prefix": True,
            "prefill": "one-shot",
            "model": self.pretrained,
            "weights_hash": weights_hash(self.model),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "max_length": self.max_length,
        }

    def get_model_info(self) -> dict[str, object]:
        """What lm-eval writes beside its results: under `learnkv` how tokens were evicted, and a hash of the weights for a hub's commit."""
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": self.model.dtype,
            "model_revision": self.revision,
            "model_sha": "",
            "learnkv": self.protocol,
        }

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Raises ValueError where `--use_cache` names a file with answers that were given otherwise: it knows them by request only."""
        held, mine = cache_hook.dbdict, json.dumps(self.protocol, sort_keys=True)
        if held is not None:
            if len(held) and held.get("learnkv") != mine:
                raise ValueError(
                    "the file that --use_cache names holds answers of another model, method, budget or setting; give each its own file"
                )
            held["learnkv"] = mine
        super().set_cache_hook(cache_hook)

    # ---- one forward

    @torch.no_grad()
    def prefill(self, ids: Tensor, mask: Tensor) -> EvictionCache:
        """A frozen cache with what the policy keeps of ids [B, T], which may be none; mask [B, T] is 0 on padding, at the left."""
        cache = EvictionCache(self.policy, self.model)
        if ids.shape[1]:
            decoder_of(self.model)(input_ids=ids, attention_mask=mask, position_ids=counted(mask), cache=cache, use_cache=True)
        cache.frozen = True
        return cache

    @torch.no_grad()
    def log_probabilities(self, cache: EvictionCache, ids: Tensor, mask: Tensor) -> Tensor:
        """[B, T, V] float32 of the token after each of ids [B, T]; mask [B, columns + T] is 0 on padding."""
        positions = counted(mask)[:, -ids.shape[1] :]
        out = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True)
        return out.logits.float().log_softmax(-1)

    # ---- lm-eval's requests

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation: object) -> Tensor:
        """Token ids [B, at most max_length] of left-padded context [B, T] and the answers to it."""
        mask = cast(Tensor, generation["attention_mask"])
        with attach(self.model):
            cache = self.prefill(context[:, :-1], mask[:, :-1])
            cache.frozen = not self.eviction.decode
            cache.batch_repeat_interleave(cast(int, generation.get("num_beams", 1)))
            return super()._model_generate(context, max_length, stop, cache=cache, **generation)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """An answer per request; a batch is of contexts, of which each is prefilled once."""
        if override_bs is not None:  # `loglikelihood_rolling`, which has cut the text into windows and these into batches
            return self.read(requests)
        asked = by_context(requests, self.max_length)
        contexts, answers = sorted(asked, key=len, reverse=True), dict[int, Answer]()
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        size = self.contexts_at_once(requests)
        for start in range(0, len(contexts), size):
            batch = contexts[start : start + size]
            which = [(row, i) for row, context in enumerate(batch) for i in asked[context]]
            for (_, i), answer in zip(which, self.score(batch, [(row, requests[i][2]) for row, i in which]), strict=True):
                answers[i] = answer
                self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
                bar.update()
        bar.close()
        return [answers[i] for i in range(len(requests))]

    def contexts_at_once(self, requests: Sequence[Request]) -> int:
        """The batch size, found on the longest request where it is to be found."""
        if self.batch_size != "auto":
            return int(self.batch_size)
        if requests:
            self.batch_sizes = {0: self._detect_batch_size([max(requests, key=lambda request: len(request[1]) + len(request[2]))])}
        return int(self.batch_sizes.get(0, 1))

    def score(self, contexts: Sequence[tuple[int, ...]], asked: Sequence[tuple[int, list[int]]]) -> list[Answer]:
        """An answer per (row of contexts, continuation) of `asked`; as many continuations at once as there are contexts."""
        ids, mask = padded([context[:-1] for context in contexts], "left", self.device)
        answers = []
        with attach(self.model):
            held = self.prefill(ids, mask)
            for start in range(0, len(asked), len(contexts)):
                some = asked[start : start + len(contexts)]
                rows = torch.tensor([row for row, _ in some])
                new, real = padded([[contexts[row][-1], *continuation[:-1]] for row, continuation in some], "right", self.device)
                cache = held.clone()
                cache.batch_select_indices(rows)
                said = self.log_probabilities(cache, new, torch.cat([mask[rows.to(mask.device)], real], 1))
                for row, (_, continuation) in zip(said, some, strict=True):
                    answers.append(answer_of(*judged(row[: len(continuation)], torch.tensor(continuation, device=row.device))))
        return answers

    def read(self, windows: Sequence[Request]) -> list[Answer]:
        """An answer per window of a text, read in chunks, after each of which the policy evicts."""
        whole = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in windows]
        ids, mask = padded([tokens[:-1] for tokens in whole], "right", self.device)
        wanted, _ = padded([tokens[1:] for tokens in whole], "right", self.device)
        found = []
        with attach(self.model):
            cache = EvictionCache(self.policy, self.model)
            for start in range(0, ids.shape[1], self.eviction.rolling_chunk):
                stop = min(start + self.eviction.rolling_chunk, ids.shape[1])
                said = self.log_probabilities(cache, ids[:, start:stop], mask[:, :stop])
                found.append(judged(said, wanted[:, start:stop]))
        likelihood, greedy = (torch.cat(parts, 1) for parts in zip(*found, strict=True))  # [B, T]
        scored = [slice(len(tokens) - 1 - len(window[2]), len(tokens) - 1) for tokens, window in zip(whole, windows, strict=True)]
        return [answer_of(likelihood[row, part], greedy[row, part]) for row, part in enumerate(scored)]


def check_arguments(given: Mapping[str, object], hints: Mapping[str, object]) -> None:
    """Raises a ValueError for a name that is none of hints', and for a value of another type."""
    for name, value in given.items():
        if name not in hints:
            raise unknown("argument of model learnkv:", name, hints)
        if not fits(value, hints[name]):
            kind = getattr(hints[name], "__name__", str(hints[name]))
            raise ValueError(f"{name}={value!r} is of type {type(value).__name__}; give {kind}")


def constructor_hints(kind: type[EvictionLM]) -> dict[str, object]:
    """Types of a constructor's arguments by name, without `eviction`, whose fields are given one by one."""
    return {name: hint for name, hint in get_type_hints(kind.__init__).items() if name not in ("eviction", "return")}


def by_context(requests: Sequence[Request], max_length: int) -> dict[tuple[int, ...], list[int]]:
    """Which requests have a context, as it is left where context and continuation exceed max_length + 1 tokens."""
    found = defaultdict(list)
    for i, (_, context, continuation) in enumerate(requests):
        assert context and 0 < len(continuation) <= max_length, "lm-eval gives an empty context its prefix token"
        found[tuple(context[-(max_length + 1 - len(continuation)) :])].append(i)
    return dict(found)


def padded(rows: Sequence[Sequence[int]], side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids [B, T], mask [B, T] int64) of rows of token ids, which may be empty; padding is 0 in both."""
    T = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), T, dtype=torch.int64)
    for b, row in enumerate(rows):
        where = slice(T - len(row), T) if side == "left" else slice(0, len(row))
        ids[b, where], mask[b, where] = torch.tensor(row, dtype=torch.int64), 1
    return ids.to(device), mask.to(device)


def counted(mask: Tensor) -> Tensor:
    """[B, T] RoPE positions that count real tokens, as `generate` has them."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def judged(said: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability [..., T], whether it is the largest [..., T]) of wanted [..., T] among said [..., T, V]."""
    return said.gather(-1, wanted[..., None])[..., 0], said.argmax(-1) == wanted


def answer_of(likelihood: Tensor, greedy: Tensor) -> Answer:
    return float(likelihood.sum()), bool(greedy.all())
