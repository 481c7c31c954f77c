"""The ways people come to generate: pipelines, streams, threads, several caches on one model; and leaving in the middle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Barrier, Thread

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer, pipeline

import learnkv
from learnkv.methods import METHODS
from learnkv.observation import Observation, Scorer
from learnkv.policy import Policy
from learnkv.runtime.attach import attach, evict
from learnkv.runtime.cache import EvictionCache
from tests.tiny_models import generate, prompt, tiny

POLICIES = [
    METHODS["snapkv"](24, num_recent=8),
    METHODS["h2o"](24, allocate="adaptive", num_recent=8),
    METHODS["random"](24, allocate="adaptive_global", num_recent=8),
]
GREEDY = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False)

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def tokenizer():
    """A word for each of the 97 ids."""
    words = ["<pad>", "<s>", *(f"w{i}" for i in range(2, 96)), "</s>"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left")


def text(n: int) -> str:
    return " ".join(f"w{i}" for i in prompt(n)[0].tolist())


def evicted(model, tokenizer, n: int) -> str:
    """What generate says after n tokens."""
    with learnkv.evict(model, "snapkv", budget=24, num_recent=8):
        return tokenizer.decode(generate(model, prompt(n))[0, n:])


# ---- pipelines and streams


def test_a_pipeline_inside_evict_says_what_generate_says(model, tokenizer):
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with learnkv.evict(model, "snapkv", budget=24, num_recent=8):
        got = pipe(text(40), return_full_text=False, **GREEDY)[0]["generated_text"]
    assert got.split() == evicted(model, tokenizer, 40).split()
    assert got != pipe(text(40), return_full_text=False, **GREEDY)[0]["generated_text"]


def test_a_pipeline_of_batches_says_of_each_text_what_it_says_alone(model, tokenizer):
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with learnkv.evict(model, "snapkv", budget=24, num_recent=8):
        got = pipe([text(40), text(27)], batch_size=2, return_full_text=False, **GREEDY)
    assert [out[0]["generated_text"].split() for out in got] == [evicted(model, tokenizer, n).split() for n in (40, 27)]


def test_a_text_streamed_from_a_thread_inside_evict_is_what_generate_says(model, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    with learnkv.evict(model, "snapkv", budget=24, num_recent=8):
        thread = Thread(target=model.generate, kwargs=dict(inputs=prompt(40), streamer=streamer, **GREEDY))
        thread.start()
        got = "".join(streamer)
        thread.join()
    assert got.split() == evicted(model, tokenizer, 40).split()


def test_a_text_streamed_to_the_terminal_is_what_generate_says(model, tokenizer, capsys):
    with learnkv.evict(model, "snapkv", budget=24, num_recent=8):
        model.generate(prompt(40), streamer=TextStreamer(tokenizer, skip_prompt=True), **GREEDY)
    assert capsys.readouterr().out.split() == evicted(model, tokenizer, 40).split()


# ---- several users of one model


def at_once(*jobs: Callable[[], Tensor]) -> list[Tensor]:
    """What each job gives in a thread of its own, all started together."""
    results: dict[int, Tensor] = {}
    barrier = Barrier(len(jobs), timeout=60)

    @torch.no_grad()
    def work(i: int) -> None:
        barrier.wait()
        results[i] = jobs[i]()

    threads = [Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[i] for i in range(len(jobs))]


def test_threads_with_caches_of_their_own_get_what_each_gets_alone(model):
    jobs = [lambda policy=policy: generate(model, prompt(40), EvictionCache(policy, model), n=20) for policy in POLICIES]
    with attach(model):
        want = [job() for job in jobs]
        got = at_once(*jobs)
    assert len({tuple(out[0].tolist()) for out in want}) == len(POLICIES)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_threads_that_each_evict_by_their_own_policy_get_what_each_gets_alone(model):
    def job(policy: Policy, n: int) -> Tensor:
        with evict(model, policy):
            return generate(model, prompt(40), n=n)

    jobs = [lambda policy=policy, n=n: job(policy, n) for policy, n in zip(POLICIES, (4, 12, 20), strict=True)]
    want = [job() for job in jobs]
    assert all(torch.equal(g, w) for g, w in zip(at_once(*jobs), want, strict=True))
    assert model.config._attn_implementation == "sdpa"


def test_the_latest_evict_counts_and_the_outer_one_again_after_it(model):
    want = [evicted_by(model, policy) for policy in POLICIES[:2]]
    with evict(model, POLICIES[0]):
        with evict(model, POLICIES[1]):
            assert torch.equal(generate(model, prompt(40)), want[1])
        assert torch.equal(generate(model, prompt(40)), want[0])


def evicted_by(model, policy: Policy) -> Tensor:
    with attach(model):
        return generate(model, prompt(40), EvictionCache(policy, model))


def test_the_last_of_several_attach_blocks_restores_the_model(model):
    first, second = attach(model), attach(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model(prompt(40), cache=EvictionCache(POLICIES[0], model)).logits.isfinite().all()
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_two_caches_taken_in_turn_go_on_as_each_would_alone(model):
    steps = prompt(6, seed=7).split(1, 1)
    with attach(model):
        alone = []
        for policy, seed in zip(POLICIES, (1, 2, 3), strict=True):
            cache = EvictionCache(policy, model)
            model(prompt(40, seed=seed), cache=cache)
            alone.append([model(step, cache=cache).logits for step in steps])
        caches = [EvictionCache(policy, model) for policy in POLICIES]
        for cache, seed in zip(caches, (1, 2, 3), strict=True):
            model(prompt(40, seed=seed), cache=cache)
        in_turn = [[model(step, cache=cache).logits for cache in caches] for step in steps]
    for i, logits in enumerate(in_turn):
        assert all(torch.equal(mine, alone[c][i]) for c, mine in enumerate(logits))


# ---- leaving in the middle


@dataclass(frozen=True, eq=False)
class BreaksLater(Scorer):
    """Scores like StreamingLLM until it was asked `times` times."""

    times: int
    asked: list[int]

    def score(self, obs: Observation) -> Tensor:
        self.asked.append(obs.layer)
        if len(self.asked) > self.times:
            raise KeyboardInterrupt
        return obs.positions.float()


def test_an_interrupt_in_the_middle_of_generate_leaves_the_model_as_it_was_and_the_cache_refused(model):
    want = generate(model, prompt(40))
    cache = EvictionCache(Policy(BreaksLater(3 * 4 + 1, []), 40), model)
    with pytest.raises(KeyboardInterrupt), attach(model):
        generate(model, prompt(40), cache)
    assert cache.get_seq_length() > 40
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(generate(model, prompt(40)), want)
    with attach(model), pytest.raises(ValueError, match="stopped half way, so its layers differ; reset\\(\\) it or use a clone"):
        model(prompt(1), cache=cache)


# ---- compiled


@pytest.mark.slow
def test_a_compiled_model_gives_what_the_model_gives(model):
    policy, ids, new = METHODS["snapkv"](24, num_recent=8), prompt(60), prompt(1, seed=3)
    compiled = torch.compile(model, backend="eager")
    with attach(model):
        plain, caught = EvictionCache(policy, model), EvictionCache(policy, model)
        for tokens in (ids, new, new):
            assert torch.equal(compiled(tokens, cache=caught).logits, model(tokens, cache=plain).logits)
