"""GovReport (arXiv:2104.02112): the summary of a report, which is compressed before it is asked for; from a hub id, or govreport.jsonl.

The words around the report are ours.  LongBench's gov_report is 200 of these with LongBench's words.
"""

from __future__ import annotations

from learnkv.prompts import Prompt, Question
from learnkv.tasks.hub import Row, Table, in_order
from learnkv.tasks.metrics import rouge_l
from learnkv.tasks.task import SPLIT, Task


def prompt_of(row: Row) -> Prompt:
    summary = row.text("summary").strip()
    question = Question(SUMMARISE, "Summary:", f" {summary}", None, (summary,))
    return Prompt("govreport", SPLIT, f"{READ}{row.text('report').strip()}\n\n", (question,))


READ = "Read the following report of a government's office.\n\n"
SUMMARISE = "Summarise the report in about 500 words: why it was written, what was found, and what is recommended."
HUB_ID = "ccdv/govreport-summarization"
FROM = in_order(Table("GovReport", "govreport", ("report", "summary"), config="document"), prompt_of)
GOVREPORT = Task("govreport", FROM(HUB_ID), rouge_l, 512, benchmark="GovReport", paper="2104.02112", count=973, read=FROM)
