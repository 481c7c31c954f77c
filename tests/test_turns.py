"""A chat of many turns in a cache that evicts at every turn and while it answers."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from learnkv import methods
from learnkv.capture import blocks_of, decoder_of
from learnkv.evaluation.stream import text_of
from learnkv.models import load_model
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from tests.recording import byte_tokenizer, tiny_model

ASKED, ANSWERED = 2, 1  # tokens of a turn


@dataclass
class Chat:
    """What was said and, per layer, which tokens [H, n, n] each token saw; logits where an answer was given."""

    visible: list[Tensor]
    tokens: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)
    nbytes: list[int] = field(default_factory=list)

    def forward(self, model, cache, new):
        """One forward; its tokens see what is held, and each other."""
        begin, stop = len(self.tokens), len(self.tokens) + len(new)
        held = cache.kept_positions() if begin else []
        for visible, layer in zip(self.visible, held, strict=False):
            for h, positions in enumerate(layer[0]):
                visible[h, begin:stop, positions[positions >= 0].long()] = True
        for visible in self.visible:
            visible[:, begin:stop, begin:stop] = torch.ones(len(new), len(new), dtype=torch.bool).tril()
        self.tokens += new
        self.logits[stop - 1] = model(torch.tensor([new]), cache=cache).logits[0, -1]


def chat(model, tokenizer, policy, turns):
    """The cache after all turns, and the chat."""
    asked = text_of(tokenizer, turns * ASKED).split(ASKED)
    with attach(model):
        cache = EvictionCache(policy, model)
        heads, n = model.config.num_key_value_heads, turns * (ASKED + ANSWERED)
        said = Chat([torch.zeros(heads, n, n, dtype=torch.bool) for _ in cache.layers])
        for question in asked:
            said.forward(model, cache, question.tolist())
            for _ in range(ANSWERED):
                said.forward(model, cache, [int(said.logits[len(said.tokens) - 1].argmax())])
            said.nbytes.append(cache.nbytes())
    return cache, said


def masked(model, said):
    """[n, V] logits of one plain forward in which each head sees what it saw in the chat."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    handles = []
    for visible, block in zip(said.visible, blocks_of(decoder_of(model)), strict=True):
        mask = visible.repeat_interleave(group, 0)[None]
        hook = lambda module, args, kwargs, mask=mask: (args, kwargs | {"attention_mask": mask})  # noqa: E731
        handles.append(block.self_attn.register_forward_pre_hook(hook, with_kwargs=True))
    logits = model(torch.tensor([said.tokens]), use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return logits


def check(model, tokenizer, policy, turns, atol):
    with torch.no_grad():
        cache, said = chat(model, tokenizer, policy, turns)
        want = masked(model, said)
    assert cache.get_seq_length() == len(said.tokens) == turns * (ASKED + ANSWERED)
    page = cache.states[0].held.pool.page_bytes * len(cache.states) * model.config.num_key_value_heads
    full = said.nbytes[40:]  # turns after which the budget is used up
    assert max(full) <= min(full) + 3 * page  # pages come and go, and none stays
    for layer in cache.kept_positions():
        assert (layer[0].amax(-1) == len(said.tokens) - 1).all() and (layer[0, :, 0] == 0).all()
    at = sorted(said.logits)
    got, want = torch.stack([said.logits[i] for i in at]), want[at]
    torch.testing.assert_close(got, want, atol=atol, rtol=0)
    best = want.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * atol
    assert clear.float().mean() > 0.95
    assert torch.equal(got.argmax(-1)[clear], want.argmax(-1)[clear])


@pytest.mark.parametrize("method", ["h2o", "ada_snapkv"])
def test_memory_stays_flat_and_answers_equal_a_masked_model(method):
    check(tiny_model(positions=4096), byte_tokenizer(), methods.policy(method, 40, num_recent=8, interval=2), turns=60, atol=1e-4)


@pytest.mark.slow
def test_the_bundled_model_chats_on_as_its_masked_self():
    model, tokenizer = load_model("smollm2-135m")
    check(model, tokenizer, methods.policy("ada_snapkv", 96, num_recent=32, interval=2), turns=200, atol=2e-3)
