"""Rows of cells as a table: text in columns, or Markdown."""

from __future__ import annotations


def aligned(cells: list[list[str]]) -> str:
    """Rows of cells as text in columns of equal width."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)


def markdown(cells: list[list[str]]) -> str:
    """Rows of cells as a table in GitHub's Markdown, the first one its header."""
    rows = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)
