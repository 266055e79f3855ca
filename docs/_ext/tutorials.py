"""Runs the tutorials, inserts printed output and pictures into the pages, and writes notebooks.

    python docs/_ext/tutorials.py               # all
    python docs/_ext/tutorials.py first lora    # some

The Python blocks of a page run in order, in one namespace and in an empty folder. A block with the title "Output"
follows with the printed text. A picture ``../assets/tutorials/<page>-<name>.png`` is the file ``<name>.png`` in the
folder.
"""

import io
import json
import os
import re
import shutil
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path

from lightning_fed.report.figures import COLORS, INK

PAGES = sorted((Path(__file__).parents[1] / "tutorials").glob("*.md"))
PAGES = [
    page for page in PAGES if page.stem not in ("index", "machines", "mri", "study")
]  # shell commands, no notebook
_CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text title=\"Output\"\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
_PICTURE = re.compile(r"\]\(\.\./assets/tutorials/(\w+)-(\w+)\.png\)")


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Python blocks of a page, each with the printed text."""
    return [(match[1], match[2] or "") for match in _CODE.finditer(text)]


def pictures(text: str) -> list[str]:
    """Names of the pictures in a page."""
    return [name for _, name in _PICTURE.findall(text)]


def run(page: Path, folder: Path) -> list[str]:
    """Runs a page in a folder, and returns the printed text of each block."""
    from matplotlib import cycler, rc_context

    colored = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = {"savefig.transparent": True, "legend.frameon": False, "axes.prop_cycle": cycler(color=COLORS)}
    printed, namespace = [], {"__name__": "tutorial"}
    with chdir(folder), rc_context(style | dict.fromkeys(colored, INK)):  # for light and dark pages
        text = page.read_text()
        for match in _CODE.finditer(text):
            lines = "\n" * (text[: match.start()].count("\n") + 1)  # errors name the line in the page
            with redirect_stdout(io.StringIO()) as out:
                exec(compile(lines + match[1], str(page), "exec"), namespace)
            printed.append("\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines()))
    return printed


def with_output(text: str, printed: list[str]) -> str:
    """Page with the printed text after each block."""
    outputs = iter(printed)

    def write(match: re.Match[str]) -> str:
        out = next(outputs)
        return f"```python\n{match[1]}```\n" + (f'\n```text title="Output"\n{out}\n```\n' if out else "")

    return _CODE.sub(write, text)


def as_notebook(text: str) -> str:
    """Page as a Jupyter notebook without output."""
    cells, position = [], 0

    def add(kind: str, source: str) -> None:
        lines = source.strip("\n").splitlines(keepends=True)
        if lines:
            more = {"execution_count": None, "outputs": []} if kind == "code" else {}
            cells.append({"cell_type": kind, "id": f"cell{len(cells)}", "metadata": {}, "source": lines, **more})

    for match in _CODE.finditer(text):
        add("markdown", _for_notebook(text[position : match.start()]))
        add("code", match[1])
        position = match.end()
    add("markdown", _for_notebook(text[position:]))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def _for_notebook(text: str) -> str:
    """Points links to the site, and pictures to the files drawn by the cells."""
    text = re.sub(r"^\[This page as a notebook\].*\n", "", text, flags=re.MULTILINE)
    text = _PICTURE.sub(r"](\2.png)", text)
    text = re.sub(r"\.png\)\{[^}]*\}", ".png)", text)
    site = "https://lightning-fed.github.io/lightning-fed/"
    text = re.sub(r"\]\(\.\./([\w/]+)\.md(#[\w-]*)?\)", rf"]({site}\1/\2)", text)
    return re.sub(r"\]\(([\w-]+)\.md(#[\w-]*)?\)", rf"]({site}tutorials/\1/\2)", text)


def main(names: list[str]) -> None:
    """Runs the named pages, and updates pages, pictures and notebooks."""
    for page in PAGES:
        if names and page.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            printed = run(page, Path(folder))
            text = with_output(page.read_text(), printed)
            assets = page.parents[1] / "assets" / "tutorials"
            for name in pictures(text):
                shutil.copy(Path(folder, f"{name}.png"), assets / f"{page.stem}-{name}.png")
        page.write_text(text)
        page.with_suffix(".ipynb").write_text(as_notebook(text))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
