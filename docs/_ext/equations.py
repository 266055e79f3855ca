"""Writes the site's equations as MathML, which browsers draw by themselves: no script, no download.

After zensical has built it: ``python docs/_ext/equations.py site``.
"""

import html
import re
import sys
from pathlib import Path

from latex2mathml.converter import convert

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def draw(match: re.Match[str]) -> str:
    """An equation as pymdownx.arithmatex leaves it, as MathML."""
    element, kind, text = match.groups()
    display = "block" if kind == "[" else "inline"
    return f'<{element} class="arithmatex">{convert(html.unescape(text), display=display)}</{element}>'


def main(site: Path) -> None:
    """Rewrites the pages of a site."""
    for page in site.rglob("*.html"):
        before = page.read_text()
        after = EQUATION.sub(draw, before)
        if after != before:
            page.write_text(after)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
