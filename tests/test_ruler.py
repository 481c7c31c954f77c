"""RULER's tasks: prompts as the original's generators make them, which the slow tests run beside ours."""

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import yaml
from transformers import AutoTokenizer

from learnkv import assets, models
from learnkv.tasks import TASKS, ruler_data
from learnkv.tasks.ruler import NEEDLES, RULER, grown, renamed, text_of
from tests.task_parts import forget, package, word_tokenizer  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parents[1]
NAMES = [task.name for task in RULER]
PLAIN = word_tokenizer()


def made(name, num_tokens=1200, count=3):
    return TASKS[name].prompts(PLAIN, num_tokens, count, 42)


# ---- what a prompt holds


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", NEEDLES)
def test_every_needle_asked_for_lies_in_the_haystack(name):
    for prompt in made(name):
        (question,) = prompt.questions
        assert len(question.references) == NEEDLES[name].queries * NEEDLES[name].values
        assert all(prompt.context.count(f"is: {value}.") == 1 for value in question.references)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["niah_single_2", "niah_multiquery"])
def test_one_value_is_asked_for_in_the_singular_and_several_in_the_plural(name):
    question = made(name)[0].questions[0]
    assert ("What is the magic number of" in question.text) == (name == "niah_single_2")
    assert ("What are all the magic numbers of" in question.text) == (name == "niah_multiquery")


@pytest.mark.usefixtures("package")
def test_variables_form_one_chain_after_an_example_with_others():
    for prompt in made("vt"):
        example, sample = prompt.context.split("\n\n\n\n")
        variables = prompt.questions[0].references
        assert len(set(variables)) == 5 and not any(variable in example for variable in variables)
        assert all(f"VAR {new} = VAR {old} " in sample for old, new in pairwise(variables))
        assert prompt.questions[0].prefix.endswith(" ")  # as in the original, whose example has two blanks there


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("num_tokens", [1200, 4096])
def test_common_words_stand_as_often_as_their_length_says(num_tokens):
    for prompt in made("cwe", num_tokens):
        words = prompt.context.rpartition("Words:")[2].split()
        often = [word for word in set(words[1::2]) if words.count(word) > 3]
        assert set(often) == set(prompt.questions[0].references) and len(often) == 10
        assert {words.count(word) for word in often} == ({6} if num_tokens < 4096 else {30})


@pytest.mark.usefixtures("package")
def test_frequent_words_are_those_after_the_dots():
    for prompt in made("fwe"):
        words = prompt.context.partition("Codes: ")[2].split()
        ranked = sorted(set(words), key=words.count, reverse=True)
        assert ranked[0] == "..." and set(ranked[1:4]) == set(prompt.questions[0].references)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("name", "library"), [("qa_1", ruler_data.squad), ("qa_2", ruler_data.hotpotqa)])
def test_the_documents_of_a_question_are_among_those_given(name, library):
    for prompt, asked in zip(made(name), library().questions, strict=False):
        assert prompt.questions[0].text == f"Question: {asked.question}"
        assert all(library().documents[i] in prompt.context for i in asked.documents)


@pytest.mark.usefixtures("package")
def test_only_answerable_questions_are_asked():
    assert not any(asked.question == "Why?" for asked in ruler_data.squad().questions)


def test_word_pairs_are_all_of_them_in_order_and_each_once():
    adjectives, nouns = (
        ["blue", "blue-eyed", "old", "teeny", "teeny-tiny", "blue", "o"],
        ["f", "girl", "eyed-girl", "zoo", "eyed-zoo", "a b"],
    )
    pairs = ruler_data.WordPairs(adjectives, nouns)
    assert list(pairs) == sorted({f"{a}-{n}" for a in adjectives for n in nouns})


@pytest.mark.parametrize(("sizes", "amount"), [([5, 9, 12], 20), ([5, 9, 10, 12], 40), ([11], 0), ([1, 2, 3, 4, 5], 45)])
def test_haystack_grows_until_a_sample_is_too_long_or_nothing_is_left(sizes, amount):
    left = iter(sizes)
    assert grown(lambda amount: next(left), room=10, step=10, most=45) == amount


@pytest.mark.usefixtures("package")
def test_an_examples_variables_are_replaced_wherever_they_stand():
    example = "VAR AAA = 1 VAR BBB = VAR AAA they are:  AAA BBB\n\n"
    changed = renamed(example, Random(0))
    assert "AAA" not in changed and "BBB" not in changed and len(changed) == len(example)


@pytest.mark.parametrize(
    ("text", "want"),
    [("", []), ("One. Two! Three?", ["One.", "Two!", "Three?"]), (" No end ", ["No end"]), ("v1.5 is out.", ["v1.5 is out."])],
)
def test_sentences_end_at_a_mark_before_a_blank(text, want):
    assert ruler_data.sentences(text) == want


def test_a_data_package_without_what_is_read_from_it_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "long_context_eval" / "data" / "synthetic"
    folder.mkdir(parents=True)
    (folder / "niah.py").write_text("other = 1\n")
    monkeypatch.setattr(assets, "fetch", lambda name: tmp_path)
    with pytest.raises(ValueError, match=r"niah.py assigns no literal to needle; remove the folder and let it be fetched again"):
        ruler_data.literal("niah.py", "needle")


# ---- beside the original


@pytest.fixture(scope="module")
def real():
    """The data package itself, whatever a test before has put in its place."""
    forget()
    return assets.fetch("ruler")


@pytest.fixture(scope="module")
def fewer_words(tmp_path_factory):
    """wonderwords with one word in ten: the original holds every pair of an adjective and a noun, which are 6 million."""
    folder = tmp_path_factory.mktemp("words") / "wonderwords"
    shutil.copytree(assets.fetch("wonderwords") / "wonderwords", folder)
    for path in (folder / "assets").glob("*list.txt"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[::10]))
    return folder.parent


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """The bundled model's tokenizer without its chat template, which the original knows nothing of."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(models.bundled_folder("smollm2-135m"))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


def run_original(wheel: Path, words: Path, tokenizer: Path, out: Path, num_tokens: int, count: int, seed: int, names: list[str]) -> dict:
    """{task: rows} of the original's generators."""
    arguments = [wheel, words, tokenizer, out, num_tokens, count, seed, *names]
    command = [sys.executable, "-m", "tests.ruler_original", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: [json.loads(line) for line in (out / name / "validation.jsonl").read_text().splitlines()] for name in names}


@pytest.fixture
def same_words(real, fewer_words, monkeypatch):
    """Our generators with the original's few words."""
    monkeypatch.setattr(assets, "fetch", lambda name: {"ruler": real, "wonderwords": fewer_words}[name])
    forget()
    yield fewer_words
    forget()


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "seed"), [(2048, 42), (4096, 7)])
def test_prompts_answers_and_lengths_are_the_originals(real, same_words, tokenizer_folder, tmp_path, num_tokens, seed):
    rows = run_original(real, same_words, tokenizer_folder, tmp_path, num_tokens, 4, seed, NAMES)
    tokenizer, compared = AutoTokenizer.from_pretrained(tokenizer_folder), 0
    for name in NAMES:
        prompts = TASKS[name].prompts(tokenizer, num_tokens, 4, seed)
        for prompt, row in zip(prompts, rows[name], strict=True):
            if row["length"] <= num_tokens:  # fwe's may be longer than asked for
                assert text_of(prompt) == row["input"].removeprefix(" "), name
                assert list(prompt.questions[0].references) == row["outputs"]
                if name != "vt":  # whose length is that before the example's variables are replaced
                    assert len(tokenizer.tokenize(text_of(prompt))) + TASKS[name].max_new_tokens == row["length"]
                compared += 1
    assert compared > 4 * len(NAMES) - 4


@pytest.mark.slow
def test_settings_are_the_originals(real):
    tasks = yaml.safe_load((real / "long_context_eval" / "synthetic.yaml").read_text())
    tokens = {name: ruler_data.literal("constants.py", "TASKS")[task["task"]]["tokens_to_generate"] for name, task in tasks.items()}
    assert tokens == {task.name: task.max_new_tokens for task in RULER}
    for name, needles in NEEDLES.items():
        kinds = {"type_haystack": needles.haystack, "type_needle_k": needles.key, "type_needle_v": needles.value}
        counts = {"num_needle_v": needles.values, "num_needle_q": needles.queries, "num_needle_k": needles.keys}
        assert tasks[name]["args"] == kinds | counts


@pytest.mark.slow
def test_pairs_of_the_real_word_lists_are_in_the_originals_order(real):
    adjectives, nouns = ruler_data.vocabulary("adjective"), ruler_data.vocabulary("noun")[::40]
    assert list(ruler_data.WordPairs(adjectives, nouns)) == sorted({f"{a}-{n}" for a in adjectives for n in nouns})


GOLDEN = {
    "niah_single_1": "331b2e993a988b54",
    "niah_single_2": "891424ade4023064",
    "niah_single_3": "da6beac766d9b495",
    "niah_multikey_1": "70512bfc4df93b1d",
    "niah_multikey_2": "7e1e931173b939bb",
    "niah_multikey_3": "7b33b348f93ed129",
    "niah_multivalue": "1c0b7f9f55b56763",
    "niah_multiquery": "2dc664b17d963e39",
    "vt": "809dd092de4d6a6f",
    "cwe": "ecf42d7c3c3b1650",
    "fwe": "8f3c000bde510fec",
    "qa_1": "9dd345089e625649",
    "qa_2": "ac0e0a5757091ca9",
    "needle": "97a106d73907447d",
    "multi_turn_synth": "fc66e3ac7a80ebbb",
    "passage_retrieval_synth": "524c064179e64b90",
    "passage_count_synth": "b087c15761a0fca1",
    "yes_no_synth": "1852c4069439c642",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_prompt_sets_are_the_same_on_every_machine(real, name):
    tokenizer = AutoTokenizer.from_pretrained(models.bundled_folder("smollm2-135m"))
    prompts = TASKS[name].prompts(tokenizer, 2048, 3, 42)
    assert sha256(" ".join(prompt.id for prompt in prompts).encode()).hexdigest()[:16] == GOLDEN[name]
