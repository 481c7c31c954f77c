"""The benchmark says what it measured; what it measures is not timed here."""

import sys

import pytest
import torch

from learnkv import bench, config
from learnkv.evaluation import speed
from learnkv.evaluation.speed import BenchSettings
from learnkv.evaluation.stream import CONTENDERS, StreamSettings, listed, losses, perplexities, text_of
from tests.recording import byte_tokenizer, tiny_model

SMALL = BenchSettings(num_tokens=200, steps=1, turns=1, stream=96, chunk=16, stream_budget=40, batch=2, batch_tokens=60)


def test_every_figure_stands_beside_what_it_is_compared_with():
    figures = list(speed.runtime(tiny_model(), SMALL))
    assert len(figures) == 7
    assert sum("DynamicCache" in f.what + f.value for f in figures) == 4
    assert [f.bound for f in figures if f.bound] == ["at most 1.10 x", "at least 1.35 x", "at most 12%", "at most 3%", "at most 56"]


def test_chunked_prefill_never_holds_more_than_budget_and_chunk():
    assert speed.chunked(tiny_model(), SMALL).value == "56 tokens per head"


def test_kvpress_stands_beside_where_its_python_is_given(tmp_path):
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho loading; echo '{"full_ms": 30.0, "ms": 60.0, "full_bytes": 100, "bytes": 100}'""")
    python.chmod(0o755)
    figure = speed.beside_kvpress(tiny_model(), BenchSettings(kvpress=str(python)))
    assert figure.value == "60.0 ms, 0.50 x faster than its full cache, holds 100% of it"


def test_a_python_without_kvpress_is_named_with_its_last_word():
    with pytest.raises(ValueError, match="ended with 1: ModuleNotFoundError"):
        speed.beside_kvpress(tiny_model(), BenchSettings(kvpress=sys.executable))


def test_a_program_that_is_no_python_is_named():
    with pytest.raises(ValueError, match=r"bench\.kvpress=/bin/true gave no figures but 'nothing'"):
        speed.beside_kvpress(tiny_model(), BenchSettings(kvpress="/bin/true"))


def test_the_fastest_turn_counts_and_the_first_does_not():
    seconds = iter([0, 0, 0, 5, 5, 7, 7, 8])  # begin and end of each turn: 0, 5, 2, 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(speed.time, "perf_counter", lambda: next(seconds))
        assert speed.in_turns({"one": lambda: None}, turns=3) == {"one": 1}


def test_the_loss_of_a_stream_in_chunks_is_that_of_one_forward():
    model, ids = tiny_model(), torch.randint(0, 60, (41,))
    want = torch.nn.functional.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:], reduction="none")
    torch.testing.assert_close(losses(model, ids, None, 7, iter), want, atol=1e-5, rtol=0)


def test_each_contender_of_a_stream_has_its_line_with_a_perplexity_per_run():
    model = tiny_model()
    figures = list(perplexities(model, byte_tokenizer(), StreamSettings(num_tokens=150, budget=48, chunk=16)))
    assert len(figures) == 1 + len(CONTENDERS)
    runs = -(-149 // model.config.max_position_embeddings)
    assert [f.value.count("/") + 1 for f in figures[1:]] == [runs] * len(CONTENDERS)
    assert listed(torch.tensor([0.0, 0.0, 1.0]), 2) == "1.00 / 2.72"


def test_a_stream_longer_than_the_texts_at_hand_is_refused():
    with pytest.raises(ValueError, match="texts give"):
        text_of(byte_tokenizer(), 10**8)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["walking"], "walking"),
        (["runtime", "bench.turns=0"], "bench.turns=0 must be 1 or more"),
        (["runtime", "bench.kept=2"], "fraction of tokens kept"),
        (["runtime", "bench.token=3"], "num_tokens"),
        (["runtime", "bench.kvpress=/no/python"], "is no program"),
        (["runtime", "bench.stream_budget=1"], "budget=1 is smaller"),
        (["stream", "stream.budget=1"], "budget=1 is smaller"),
        (["stream", "stream.num_tokens=1"], "stream.num_tokens=1 must be 2 or more"),
        (["stream", "stream.chunk=0"], "stream.chunk=0 must be 1 or more"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(argv, says, capsys):
    assert config.main(bench.run, bench.BenchCommand, bench.arguments(argv)) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
