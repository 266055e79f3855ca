"""HTML page with a summary of several runs."""

from __future__ import annotations

import urllib.parse
from pathlib import Path

from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.report.page import embed_picture, render_template
from lightning_fed.report.terminal import read_cells, split_tables


def write_overview(folder: Path, title: str, text: str) -> Path:
    r"""Writes the page ``overview.html`` on several runs. Returns the page's path.

    The page contains ``text`` (a summary with Markdown tables), the folder's pictures, and links to
    ``runs/<run>/report.html``.

    Example:
        >>> import tempfile
        >>> table = "| method | loss |\n|---|---|\n| a | 0.5 |"
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = write_overview(Path(folder), "Comparison", table).read_text()
        >>> "<td>0.5</td>" in page
        True
    """
    page = folder / "overview.html"
    parts = [(is_table, [read_cells(line) if is_table else line.replace("`", "") for line in lines])
             for is_table, lines in split_tables(text)]  # fmt: skip
    reports = sorted(folder.glob("runs/*/report.html"))
    content = render_template(
        "overview.html",
        title=title,
        parts=parts,
        pictures=[(path.stem, embed_picture(path.read_bytes())) for path in sorted(folder.glob("*.png"))],
        runs=[(path.parent.name, urllib.parse.quote(path.relative_to(folder).as_posix())) for path in reports],
    )
    write_text_atomically(page, content)
    return page
