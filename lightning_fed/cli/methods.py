"""``lightning-fed methods``: lists the federated methods with costs and options."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

from lightning_fed.argument_checks import check_option
from lightning_fed.console import markdown_table
from lightning_fed.report.terminal import draw_tables


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed methods`` with the command-line arguments ``args``."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed methods",
        description="List all methods with their typical use, or describe the named methods: payload of a visit, "
        "state between rounds, additional computation, and options with defaults. One model means the "
        "bytes of the shared entries.",
        epilog="In a recipe: `method: fedprox:mu=0.1`. A custom method is named by the import path of its class: "
        "my_project.FedMine:option=value",
    )
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="describe these methods (default: list all)")
    options = parser.parse_args(args)
    known = list(read_methods())
    try:
        for name in options.methods:
            if "." not in name:
                check_option("method", name.lower().replace("_", ""), known)
        text = "\n".join(map(describe_method, options.methods)) if options.methods else table_of_methods()
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(text)


@cache
def read_methods() -> dict[str, str]:
    """Maps the names of all registered methods to the docstrings of their classes, sorted by name."""
    # Parses the sources, because importing the methods takes seconds.
    text = "\n".join(path.read_text() for path in (Path(__file__).parents[1] / "algorithms").rglob("*.py"))
    names = re.findall(r"^(?:@register[^#]*?^class |register\(\s*)(\w+)", text, re.MULTILINE)
    classes = [statement for statement in ast.parse(text).body if isinstance(statement, ast.ClassDef)]
    texts = {statement.name: ast.get_docstring(statement) or "" for statement in classes}
    return {name.lower(): texts[name] for name in sorted(names, key=str.lower)}


def table_of_methods() -> str:
    """Formats the names and purposes of all registered methods as a table."""
    rows = [["METHOD", "FOR"], *([name, costs_of(text)["For"]] for name, text in read_methods().items())]
    table = draw_tables(markdown_table(rows))
    return f"{table}\n\n`lightning-fed methods NAME` describes a method, its costs and its options.\n"


def describe_method(name: str) -> str:
    """Describes the purpose, costs and options of a method, given by name or import path.

    Example:
        >>> print(describe_method("fedprox"))
        fedprox
            Federated averaging with a proximal term in local training.
            Sends: 1 model down, 1 up.
            Keeps: nothing.
            Costs: no additional computation.
            For: heterogeneous clients with long local training, and slow clients.
            mu=0.01, row_weighting='global'
        <BLANKLINE>
    """
    from lightning_fed.method import build_method, find_method, list_options

    method_class = find_method(name)
    options = list_options(method_class)
    text = inspect.getdoc(method_class) or ""
    lines = [text.partition("\n")[0], *(f"{name}: {value}" for name, value in costs_of(text).items())]
    lines.append(_format_options(options.items()))
    if inspect.Parameter.empty not in options.values():
        for callback in build_method(name).callbacks:
            callback_options = [option for option in list_options(callback) if option not in options]
            if callback_options:
                values = _format_options((option, getattr(callback, option)) for option in callback_options)
                lines.append(f"{type(callback).__name__}: {values}")
    paragraphs = [fill(line, 120, initial_indent="    ", subsequent_indent="    ") for line in lines if line]
    return "\n".join([name, *paragraphs, ""])


def costs_of(text: str) -> dict[str, str]:
    r"""Returns the texts of the items "Sends", "Keeps", "Costs" and "For" in a method's docstring."""
    points = re.findall(r"^- (Sends|Keeps|Costs|For): (.*(?:\n  .*)*)", text, re.MULTILINE)
    return {name: " ".join(value.split()) for name, value in points}


def _format_options(options: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(option if value is inspect.Parameter.empty else f"{option}={value!r}" for option, value in options)
