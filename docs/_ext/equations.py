"""Converts equations in the built site to MathML: browsers need no script and no download.

Run after zensical: ``python docs/_ext/equations.py site``.
"""

import html
import re
import sys
from pathlib import Path

from latex2mathml.converter import convert

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def draw(match: re.Match[str]) -> str:
    """MathML for an equation in the markup of pymdownx.arithmatex."""
    element, kind, text = match.groups()
    display = "block" if kind == "[" else "inline"
    return f'<{element} class="arithmatex">{convert(html.unescape(text), display=display)}</{element}>'


def main(site: Path) -> None:
    """Converts all pages in a folder."""
    for page in site.rglob("*.html"):
        before = page.read_text()
        after = EQUATION.sub(draw, before)
        if after != before:
            page.write_text(after)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
