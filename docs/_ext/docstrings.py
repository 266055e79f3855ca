"""Converts reStructuredText in docstrings to Markdown for the API pages: roles, mathematics, section names."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):`(~?)([\w.]+)`")
_MATH = re.compile(r":math:`([^`]*)`")
_MATH_BLOCK = re.compile(r"^( *)\.\. math::((?:.*)(?:\n(?:\1 +\S.*| *$(?=\n\1 +\S)))*)", re.MULTILINE)
_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Converts every docstring before parsing."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Receives every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Docstring in Markdown."""
    text = _ROLE.sub(_reference, text)
    text = _MATH.sub(r"\\(\1\\)", text)
    text = _MATH_BLOCK.sub(_display, text)
    return _EXAMPLE.sub(r"\1Examples:", text)  # griffe runs code only under this name


def _reference(match: re.Match[str]) -> str:
    name = match[2].rpartition(".")[2] if match[1] else match[2]
    return f'<autoref optional identifier="{match[2]}"><code>{name}</code></autoref>'


def _display(match: re.Match[str]) -> str:
    body = " ".join(textwrap.dedent(match[2]).split())
    return f"{match[1]}\\[{body}\\]"
