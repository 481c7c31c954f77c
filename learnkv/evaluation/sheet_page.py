"""The page on which a person judges a blind sheet: it counts, holds the references back until the end, and gives choices as JSON."""

from __future__ import annotations

from html import escape

from learnkv.evaluation.page import whole_page
from learnkv.evaluation.sheet import CHOICES, Item, Sheet

WORDS = {"A": "A is better", "B": "B is better", "tie": "tie"}


def html(sheet: Sheet) -> str:
    """Nothing on it says whose an answer is."""
    items = "".join(item_html(number, item) for number, item in enumerate(sheet.items, 1))
    head = f"<header><h1>Which answer is better?</h1><p>{len(sheet.items)} questions, each with two answers.</p>{INTRO}</header>"
    form = f'<form id="sheet" data-sheet="{sheet.hash}">{items}{END}</form>'
    return whole_page("Blind sheet", f"<style>{STYLE}</style>{head}{form}<script>{SCRIPT}</script>")


def item_html(number: int, item: Item) -> str:
    pair = "".join(f"<div><strong>{name}</strong>\n{escape(text) or '(nothing)'}</div>" for name, text in (("A", item.a), ("B", item.b)))
    choices = "".join(
        f'<label><input type="radio" name="{number}" value="{choice}" required> {WORDS[choice]}</label>' for choice in CHOICES
    )
    question = f'<p class="question">{escape(item.question) or "(the question was not kept beside the rows)"}</p>'
    reference = f'<p class="reference" hidden>Right answer: {escape(item.reference) or "(not kept beside the rows)"}</p>'
    return f'<fieldset><legend>{number}</legend>{question}<div class="pair">{pair}</div>{choices}{reference}</fieldset>'


INTRO = """<p>Say which answer is better, or that neither is. Which cache gave which answer is in a key file that this page does not hold.
The right answers show after the last choice, when no choice can be changed any more.</p>
<noscript><p>This page needs JavaScript to collect the choices; nothing leaves your machine.</p></noscript>"""

END = """<p id="left" role="status"></p><button id="done" type="submit" disabled>Finish</button>
<div id="out" hidden><h2>Your choices</h2>
<p>Save them, then <code>python -m learnkv.report tally=answers.json out=FOLDER</code>, FOLDER being where this page lies.</p>
<p><a id="save" download="answers.json">Save answers.json</a></p>
<textarea id="json" readonly rows="6" aria-label="your choices as JSON"></textarea></div>"""

STYLE = """
fieldset{border:1px solid var(--grid);margin:1.5rem 0;padding:.8rem 1rem;min-width:0}
legend{font-weight:600}
.pair{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,18rem),1fr))}
.pair div{border:1px solid var(--grid);padding:.5rem .8rem;white-space:pre-wrap;overflow-wrap:anywhere}
.question{white-space:pre-wrap}
label{display:inline-block;padding:.5rem 1rem .5rem 0}
textarea{width:100%;font:inherit;font-size:.85rem}
button{font:inherit;padding:.5rem 1.2rem}
"""

SCRIPT = """
const form = document.getElementById("sheet"), all = form.querySelectorAll("fieldset").length;
const chosen = () => Object.fromEntries(new FormData(form));
const count = () => {
  const left = all - Object.keys(chosen()).length;
  document.getElementById("left").textContent = left ? left + " of " + all + " left" : "all judged";
  document.getElementById("done").disabled = left > 0;
};
form.addEventListener("change", count);
form.addEventListener("submit", event => {
  event.preventDefault();
  const text = JSON.stringify({sheet: form.dataset.sheet, answers: chosen()}, null, 1);
  document.getElementById("json").value = text;
  document.getElementById("save").href = "data:application/json," + encodeURIComponent(text);
  document.getElementById("out").hidden = false;
  form.querySelectorAll(".reference").forEach(each => { each.hidden = false; });
  form.querySelectorAll("input").forEach(each => { each.disabled = true; });
  document.getElementById("done").hidden = true;
});
count();
"""
