import pytest
import torch

from learnkv.traces.format import Continuation
from learnkv.traces.targets import attention as attention_target
from learnkv.traces.targets import context_mass, cut_positions, future_rows, peak_logit, utility, utility_cuts

SIZES = [(1, 5), (4, 63), (7, 150)]  # query heads per KV head, tokens: one block of rows and several


def attention(queries, keys, scale):
    """[H, G, T, S] float64 weights of the last T rows of a sequence of S."""
    (H, S, D), T = keys.shape, queries.shape[1]
    logits = queries.double().view(H, -1, T, D) @ keys.double()[:, None].mT * scale
    future = torch.arange(S) > torch.arange(S - T, S)[:, None]
    return logits.masked_fill(future, float("-inf")).softmax(-1)


def random_rows(group, n, after):
    generator = torch.Generator().manual_seed(n)
    draw = lambda *size: 2 * torch.randn(*size, generator=generator)  # noqa: E731
    return draw(1, 2 * group, n + after, 8), draw(1, 2, n + after, 8)


@pytest.mark.parametrize(("group", "n"), SIZES)
def test_utility_is_the_sum_over_later_rows_of_the_group_maximum_of_full_attention(group, n):
    queries, keys = random_rows(group, n, after=9)
    want = attention(queries[0, :, n:], keys[0], 0.3)[..., :n].amax(1).sum(1)
    torch.testing.assert_close(utility(queries[:, :, n:], keys, n, 0.3)[0].double(), want, rtol=1e-5, atol=1e-6)


def test_utility_of_a_context_stays_below_the_number_of_rows_since_later_keys_keep_their_share():
    queries, keys = random_rows(1, 20, after=9)
    assert (utility(queries[:, :, 20:], keys, 20, 0.3).sum(-1) < 9).all()


@pytest.mark.parametrize(("group", "n"), SIZES)
def test_context_mass_is_the_column_sum_of_full_attention(group, n):
    queries, keys = random_rows(group, n, after=0)
    want = attention(queries[0], keys[0], 0.3).sum((1, 2))
    torch.testing.assert_close(context_mass(queries, keys, 0.3)[0].double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("group", "n"), SIZES)
def test_utility_at_a_cut_counts_the_contexts_rows_after_it_and_nothing_for_tokens_after_it(group, n):
    queries, keys = random_rows(group, n, after=0)
    end, cuts = torch.rand(1, 2, n), torch.tensor([1, n // 2, n - 1])
    got = utility_cuts(queries, keys, end, cuts, 0.3)
    for at, value in zip(cuts.tolist(), got, strict=True):
        later = attention(queries[0, :, at:], keys[0], 0.3).amax(1).sum(1) + end[0].double()
        later[:, at:] = 0
        torch.testing.assert_close(value[0].double(), later, rtol=1e-5, atol=1e-6)


def test_cut_positions_are_distinct_ascending_and_depend_on_the_seed_only():
    cuts = cut_positions(50, 8, seed=3)
    assert cuts.tolist() == sorted(set(cuts.tolist())) == cut_positions(50, 8, seed=3).tolist()
    assert cuts.tolist() != cut_positions(50, 8, seed=4).tolist()
    assert cut_positions(3, 8, seed=3).tolist() == [1, 2]


def test_future_names_the_rows_that_run_and_those_that_count():
    asked = Continuation(torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5]))
    rows = {
        future: (ids.tolist(), first) for future in ("question_answer", "answer", "response") for ids, first in [future_rows(asked, future)]
    }
    assert rows == {"question_answer": ([1, 2, 3], 0), "answer": ([1, 2, 3], 2), "response": ([1, 2, 4, 5], 2)}


@pytest.mark.parametrize(("group", "n"), SIZES)
def test_the_attention_target_is_the_mean_over_later_rows_of_each_query_heads_full_attention(group, n):
    queries, keys = random_rows(group, n, after=9)
    want = attention(queries[0, :, n:], keys[0], 0.3)[..., :n].mean(2).flatten(0, 1)
    torch.testing.assert_close(attention_target(queries[:, :, n:], keys, n, 0.3)[0].double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("group", "n"), SIZES)
def test_the_peak_logit_is_the_largest_logit_of_later_rows_over_the_group(group, n):
    queries, keys = random_rows(group, n, after=70)
    rows = queries[0, :, n:].double().view(2, group, 70, 8)
    want = (rows @ keys[0, :, None, :n].double().mT * 0.3).amax((1, 2))
    torch.testing.assert_close(peak_logit(queries[:, :, n:], keys, n, 0.3)[0].double(), want, rtol=1e-5, atol=1e-6)
