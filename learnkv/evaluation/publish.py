"""A comparison's rows -> a folder with its page, the same as Markdown and PNG files, a blind sheet with its key, and TensorBoard events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from learnkv.evaluation import board, document, page, sheet_page
from learnkv.evaluation.document import Extras
from learnkv.evaluation.figures import Figure
from learnkv.evaluation.sheet import Sheet, sheet
from learnkv.evaluation.view import View
from learnkv.files import write_atomically
from learnkv.prompts import Prompt

PAGES = "report"  # folder beside a comparison's rows
PAGE, WORDS, FIGURES, SHEET, BOARD = "index.html", "report.md", "figures", "sheet.html", "tensorboard"


@dataclass
class SheetSettings:
    """The blind sheet, which is made where rows hold generated answers."""

    line: str = ""  # whose answers stand beside the full cache's; "" for the best gate, or without one the best heuristic
    count: int = 30  # pairs of answers
    seed: int = 0  # of which pairs, and of their order


def publish(folder: Path, view: View, extras: Extras, judged: Sheet | None, board_folder: Path) -> list[tuple[str, Path]]:
    """Writes everything; returns (what it is, where it lies)."""
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    title, sections = document.title_of(view.rows), document.sections(view, extras)
    images = [draw(folder / FIGURES, block) for section in sections for block in section.blocks if isinstance(block, Figure)]
    links = [(SHEET, "Blind sheet")] if judged else []
    put(folder / PAGE, page.html(title, sections, links))
    put(folder / WORDS, page.markdown(title, sections, FIGURES))
    board.write(board_folder, view, sections, images)
    written = [("page", folder / PAGE), ("the same as Markdown", folder / WORDS), ("TensorBoard", board_folder)]
    if judged:
        put(folder / SHEET, sheet_page.html(judged))
        written += [("blind sheet", folder / SHEET), ("its key, not for the judge", judged.save_key(folder))]
    return written


def put(path: Path, text: str) -> None:
    write_atomically(path, lambda to: to.write_text(text, encoding="utf-8"))


def draw(folder: Path, figure: Figure) -> Path:
    path = folder / f"{figure.name}.png"
    write_atomically(path, lambda to: page.save_png(figure, to))
    return path


def sheet_of(view: View, prompts: Mapping[str, Prompt], line: str, count: int, seed: int) -> Sheet | None:
    """The sheet of a line at the view's budget; of the first in front where none is named."""
    return sheet(view.rows, line or next(iter(view.styles)), view.budget, prompts, count=count, seed=seed)
