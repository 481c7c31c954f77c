"""learnkv plan: usual cases end in a recommendation, traces are replayed, mistakes are one line, nothing is said without its standing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from learnkv import config, plan
from learnkv.plan import PlanCommand
from learnkv.serving import validation
from learnkv.serving.cards import CARDS
from learnkv.serving.cells import Cell
from learnkv.serving.figures import Figures
from learnkv.serving.recommend import advise
from learnkv.serving.settings import PlanSettings
from learnkv.serving.shapes import SHAPES
from learnkv.serving.simulate import simulate
from learnkv.serving.trace_file import read_trace
from learnkv.serving.workload import Load, draw
from tests.serving_parts import TINY, Even
from tests.test_serving import AMPLE, FULL

ROOT = Path(__file__).resolve().parents[1]
PRESETS = [name for name in config.recipe_names() if name.startswith("plan_")]
SMALL = ["plan.requests=6", "plan.prompt=300", "plan.output=20"]
QUALITY = "what python -m learnkv.evaluate measures"


def planned(tmp_path, capsys, *arguments: str) -> list[str]:
    """The lines of a plan that went well."""
    assert config.main(plan.run, PlanCommand, [*arguments, f"out={tmp_path / 'out'}"]) == 0
    return capsys.readouterr().out.splitlines()


def result(tmp_path) -> dict:
    return json.loads((tmp_path / "out" / "plan.json").read_text(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


# ---- presets


@pytest.mark.parametrize("recipe", PRESETS)
def test_a_usual_case_ends_in_a_recommendation_with_reasons(recipe, tmp_path, capsys):
    lines = planned(tmp_path, capsys, f"recipe={recipe}", *SMALL)
    policies = config.load([f"recipe={recipe}"], PlanCommand).plan.policies
    (chosen,) = [line for line in lines if line.startswith("recommended: ")]
    rejected = [line for line in lines if line.startswith("rejected: ")]
    assert len(rejected) == len(policies) - ("nothing here" not in chosen)
    assert all(line.count(": ") >= 2 for line in [chosen, *rejected])
    assert any(line.startswith("note: ") and line.endswith(QUALITY) for line in lines)
    assert lines[-2].startswith("result: ") and lines[-1].startswith("next: ")


def test_the_usual_cases_are_all_there():
    assert {name.removeprefix("plan_") for name in PRESETS} == {
        "one_long",
        "datacenter",
        "edge",
        "chat",
        "agents",
        "reasoning",
        "long_output",
        "preemption",
    }


def figures(**changes: float) -> Figures:
    usual = dict.fromkeys(Figures.__dataclass_fields__, 1.0) | {"refused": 0, "served": 10}
    return Figures(**usual | changes)  # type: ignore[arg-type]


def cell(policy: str, loss: int, **changes: float) -> Cell:
    return Cell(policy, "m", 1.0, 0.2, f"does {policy}", loss, "", figures(**changes))


@pytest.mark.parametrize(
    ("speeds", "changes", "chosen"),
    [
        ((100, 105), {}, "full"),  # not 10% better
        ((100, 150), {}, "evict"),
        ((100, 150), {"goal": "accuracy"}, "full"),
    ],
)
def test_what_loses_less_is_taken_where_it_is_as_good(speeds, changes, chosen):
    cells = [cell("full", 0, tokens_s=speeds[0]), cell("evict", 3, tokens_s=speeds[1])]
    assert advise(cells, PlanSettings(**changes)).policy == chosen


def test_who_refuses_requests_or_is_too_slow_is_not_taken():
    cells = [cell("full", 0, refused=2), cell("quantise", 2, ttft_p95=3.0), cell("evict", 3)]
    found = advise(cells, PlanSettings(ttft_s=2.0))
    assert found.policy == "evict"
    assert "2 of 12 requests do not fit" in found.lines[1] and "within 3.00 s only" in found.lines[2]
    assert advise(cells[:2], PlanSettings(ttft_s=2.0)).policy == ""


# ---- standing


def test_every_output_begins_with_its_standing(tmp_path, capsys, monkeypatch):
    titles = []
    monkeypatch.setattr(plan, "picture", lambda cells, title, path: titles.append(title))
    lines = planned(tmp_path, capsys, *SMALL, "plan.policies=[full]")
    assert lines[0].startswith("unvalidated: ") and "unvalidated: " in titles[0]
    assert next(iter(result(tmp_path))) == "standing" and result(tmp_path)["standing"] == lines[0]


def test_so_does_a_contest(tmp_path, capsys, monkeypatch):
    titles = []
    monkeypatch.setattr(plan, "contest_picture", lambda found, title, path: titles.append(title))
    lines = planned(tmp_path, capsys, *SMALL, "plan.policies=[full]", "compare=preemption")
    assert lines[0].startswith("unvalidated: ") and "unvalidated: " in titles[0] and result(tmp_path)["standing"] == lines[0]
    assert any(line.startswith("tokens/s") and "[" in line for line in lines)


@pytest.mark.parametrize(
    ("off", "says"), [(0.05, "validated: 200 requests on h100-80gb at abc"), (0.4, "unvalidated: on h100-80gb it predicted")]
)
def test_a_file_of_results_switches_all_of_them(off, says, tmp_path, capsys, monkeypatch):
    errors = {"tokens_s": off, "ttft_s": 0.1, "tpot_s": 0.02}
    written = {"format_version": 1, "machines": {"h100-80gb": {"commit": "abc", "requests": 200, "errors": errors}}}
    (tmp_path / "results.json").write_text(json.dumps(written))
    monkeypatch.setattr(validation, "RESULTS", tmp_path / "results.json")
    lines = planned(tmp_path, capsys, *SMALL, "plan.policies=[full]")
    assert lines[0].startswith(says) and result(tmp_path)["standing"] == lines[0]
    assert validation.standing("l40s-48gb").startswith("unvalidated: no server on l40s-48gb")


# ---- traces


LINES = [(0.0, 40, 5), (0.5, 30, 1), (0.5, 64, 12), (9.25, 7, 3)]


def written(folder: Path, kind: str) -> Path:
    path = folder / f"requests.{kind}"
    if kind == "csv":
        path.write_text("\n".join(["id,arrival,prompt,output", *(f"{i},{a},{p},{o}" for i, (a, p, o) in enumerate(LINES))]) + "\n")
    else:
        path.write_text("\n".join(json.dumps({"arrival": a, "prompt": p, "output": o}) for a, p, o in LINES) + "\n\n")
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_trace_is_replayed_as_it_is_written(kind, tmp_path):
    sessions = read_trace(written(tmp_path, kind))
    run = simulate(sessions, TINY, FULL, Even(0.01), AMPLE)
    served = sorted(run.jobs, key=lambda job: job.number)
    assert [(job.arrived, job.prompt, job.generated) for job in served] == LINES


def test_a_plan_takes_a_trace(tmp_path, capsys):
    lines = planned(tmp_path, capsys, f"plan.trace={written(tmp_path, 'jsonl')}", "plan.policies=[full,evict]")
    assert any(line.startswith("requests: 4 in 4 sessions that start within 9.2 s") for line in lines)
    assert [cell["figures"]["served"] for cell in result(tmp_path)["cells"]] == [4, 4]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"arrival": 0, "prompt": 3, "output": 1}\n{"arrival": 1, "prompt": 3', "a.jsonl:2: not JSON"),
        ("a.jsonl", '{"arrival": 0, "prompt": 0, "output": 1}', "a.jsonl:1: prompt 0 is no count"),
        ("a.jsonl", '{"arrival": 0, "prompt": 2.5, "output": 1}', "a.jsonl:1: prompt 2.5 is no count"),
        ("a.jsonl", '{"arrival": 0, "prompt": 2}', "a.jsonl:1: output is None"),
        ("a.jsonl", '{"arrival": NaN, "prompt": 2, "output": 1}', "a.jsonl:1: arrival is nan"),
        ("a.jsonl", "[1, 2, 3]", "a.jsonl:1: a request is an object"),
        (
            "a.jsonl",
            '{"arrival": 2, "prompt": 3, "output": 1}\n{"arrival": 1, "prompt": 3, "output": 1}',
            "a.jsonl:2: arrival 1 comes before 2",
        ),
        ("a.jsonl", "", "holds no requests"),
        ("a.csv", "arrival,prompt\n0,3\n", "a.csv:1: no column output"),
        ("a.csv", "arrival,prompt,output\n0,3,1\n1,x,1\n", "a.csv:3: prompt is 'x'"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(name, text, says, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert config.main(plan.run, PlanCommand, [f"plan.trace={tmp_path / name}", f"out={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan.model=llama3-7b"], "nearest: llama3-70b, llama3-8b"),
        (["plan.card=h100"], "nearest: h100-80gb"),
        (["plan.card=nowhere.json", "plan.memory_gb=8"], "No such file"),
        (["plan.card=nowhere.json"], "give plan.memory_gb"),
        (["plan.rate=0"], "plan.rate=0 must be more than 0"),
        (["plan.budget=-1"], "plan.budget=-1 must be more than 0"),
        (["plan.step_tokens=8"], "plan.step_tokens=8 must be batch=256 or more"),
        (["plan.policies=[full,evcit]"], "names 'evcit'"),
        (["plan.policies=[]"], "plan.policies is empty"),
        (["plan.sweep.rate=[1,0]"], "more than 0 throughout"),
        (["plan.trace=nowhere.csv"], "No such file"),
        (["plan.trace=a.csv", "plan.sweep.rate=[1]"], "has no meaning beside plan.trace"),
        (["plan.arrivals=often"], "often"),
        (["plan.bugdet=2"], "nearest: plan.budget"),
        (["compare=preemption", "seeds=3"], "10 or more"),
    ],
)
def test_mistakes_are_one_line(arguments, says, tmp_path, capsys):
    assert config.main(plan.run, PlanCommand, [*arguments, "plan.requests=3", f"out={tmp_path}"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert says in error[-1] and error[-1].startswith("error: ")


def test_a_measured_card_is_taken(tmp_path, capsys):
    measured = {"machine": {"device": "NVIDIA Something"}, "ceilings": {"bytes": 1e12, "flops": 1e14, "exps": 1e12}}
    (tmp_path / "kernels.json").write_text(json.dumps(measured))
    lines = planned(tmp_path, capsys, *SMALL, f"plan.card={tmp_path / 'kernels.json'}", "plan.memory_gb=40")
    assert "NVIDIA Something, 40 GB, 1.00 TB/s, 100 TFLOP/s" in lines[1]
    (tmp_path / "kernels.json").write_text("{}")
    assert config.main(plan.run, PlanCommand, [f"plan.card={tmp_path / 'kernels.json'}", "plan.memory_gb=40", f"out={tmp_path}"]) == 2
    assert "is no result of learnkv.bench kernels" in capsys.readouterr().err


# ---- sweeps, workloads, help


def test_a_sweep_gives_a_cell_for_every_combination_and_advice_for_every_rate(tmp_path, capsys):
    lines = planned(tmp_path, capsys, *SMALL, "plan.policies=[full,evict]", "plan.sweep.rate=[1,4]", "plan.sweep.budget=[0.1,0.5]")
    found = [(cell["rate"], cell["policy"], cell["budget"]) for cell in result(tmp_path)["cells"]]
    assert found == [(rate, *rest) for rate in (1.0, 4.0) for rest in (("full", 1.0), ("evict", 0.1), ("evict", 0.5))]
    assert [line for line in lines if line.startswith("at ")] == ["at llama3-8b, 1 requests/s:", "at llama3-8b, 4 requests/s:"]
    assert (tmp_path / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"plan.json", "plot.png"}


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "even"])
def test_requests_come_at_the_rate_and_have_the_lengths_that_are_asked_for(arrivals):
    sessions = draw(Load(20_000, 4.0, 500, 100, arrivals=arrivals, cv=2.0, lengths="lognormal"), 0)
    turns = [session.turns[0] for session in sessions]
    assert sessions[-1].start == pytest.approx(5000, rel=0.05)
    assert sum(turn.prompt for turn in turns) / len(turns) == pytest.approx(500, rel=0.05)
    assert sum(turn.output for turn in turns) / len(turns) == pytest.approx(100, rel=0.05)


def test_a_rate_moves_arrivals_and_nothing_else():
    slow, fast = (draw(Load(50, rate, 500, 100, lengths="lognormal"), 0) for rate in (1.0, 2.0))
    assert [s.turns for s in slow] == [s.turns for s in fast]
    assert [s.start for s in slow] == pytest.approx([2 * s.start for s in fast])


def test_turns_begin_with_all_that_came_before():
    for session in draw(Load(60, 1.0, 50, 20, lengths="geometric", turns=7, think_s=2.0), 0):
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            assert after.prompt > before.prompt + before.output


def test_help_names_every_model_and_card():
    assert plan.__doc__ and all(name in plan.__doc__ for name in [*SHAPES, *CARDS])


def test_it_starts_without_torch(tmp_path):
    arguments = [*SMALL, f"out={tmp_path}"]
    code = (
        f"import sys; from learnkv import config, plan; config.main(plan.run, plan.PlanCommand, {arguments}); print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
