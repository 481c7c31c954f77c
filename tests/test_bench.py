"""The benchmark says what it measured; what it measures is not timed here."""

import pytest

from learnkv import bench, config
from learnkv.evaluation import speed
from learnkv.evaluation.speed import BenchSettings
from tests.recording import tiny_model

SMALL = BenchSettings(num_tokens=200, steps=1, turns=1, stream=96, chunk=16, stream_budget=32, batch=2, batch_tokens=60)


def test_every_figure_stands_beside_what_it_is_compared_with():
    figures = list(speed.runtime(tiny_model(), SMALL))
    assert len(figures) == 7
    assert sum("DynamicCache" in f.what + f.value for f in figures) == 4
    assert [f.bound for f in figures if f.bound] == ["at most 1.10 x", "at least 1.35 x", "at most 12%", "at most 3%", "at most 48"]


def test_chunked_prefill_never_holds_more_than_budget_and_chunk():
    assert speed.chunked(tiny_model(), SMALL).value == "48 tokens per head"


def test_the_fastest_turn_counts_and_the_first_does_not():
    seconds = iter([0, 0, 0, 5, 5, 7, 7, 8])  # begin and end of each turn: 0, 5, 2, 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(speed.time, "perf_counter", lambda: next(seconds))
        assert speed.in_turns({"one": lambda: None}, turns=3) == {"one": 1}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["walking"], "walking"),
        (["runtime", "bench.turns=0"], "bench.turns=0 must be 1 or more"),
        (["runtime", "bench.kept=2"], "fraction of tokens kept"),
        (["runtime", "bench.token=3"], "num_tokens"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(argv, says, capsys):
    assert config.main(bench.run, bench.BenchCommand, bench.arguments(argv)) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
