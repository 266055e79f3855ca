"""``lightning-fed methods``: the methods that there are, what each costs, and their options."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import Any

import lightning_fed.recipe  # noqa: F401 - enters all methods in their table
from lightning_fed.method import build_method, find_method, list_options, method_names


def run(args: Sequence[str]) -> None:
    """The command.

    Args:
        args: The command line after ``methods``.

    """
    parser = _parser()
    options = parser.parse_args(args)
    try:
        text = "\n".join(map(describe_method, options.methods)) if options.methods else table_of_methods()
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(text)


def _parser() -> argparse.ArgumentParser:
    """Parser of the command."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed methods",
        description="List the methods, and the clients that each is for. Describe those that are named: what each sends"
        " in a visit, what clients and server keep between rounds, what it costs beside the training, its options with"
        " their defaults, and those of its callbacks. One model is as many bytes as its shared entries have.",
        epilog="In a recipe: `method: fedprox:mu=0.1`. A method of your own is named by the path of its class:"
        " my_project.FedMine:option=value",
    )
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="describe these (default: list all)")
    return parser


def table_of_methods() -> str:
    """All methods by name, each with the clients that it is for."""
    names = method_names()
    width = max(map(len, names))
    lines = [f"{'METHOD':{width}}  FOR"]
    lines += [f"{name:{width}}  {costs_of(inspect.getdoc(find_method(name)) or '')['For']}" for name in names]
    return "\n".join([*lines, "", "`lightning-fed methods NAME` describes a method, its costs and its options.", ""])


def describe_method(name: str) -> str:
    """A method's name, what it is and costs, options with defaults, and those of the callbacks that it brings.

    What it costs are the points of its documentation that begin with "Sends", "Keeps", "Costs" and "For".

    Args:
        name: Its name, or the path of its class.

    Raises:
        ValueError: If there is none.

    Example:
        >>> print(describe_method("fedprox"))
        fedprox
            The average of the clients' models by their numbers of examples; clients train with a proximal term.
            Sends: 1 model down, 1 up.
            Keeps: nothing.
            Costs: the training alone.
            For: clients that differ and train long, and stragglers.
            mu=0.01, row_weighting='global'
        <BLANKLINE>

    """
    method_class = find_method(name)
    options = list_options(method_class)
    text = inspect.getdoc(method_class) or ""
    lines = [text.partition("\n")[0], *(f"{name}: {value}" for name, value in costs_of(text).items())]
    lines.append(_write(options.items()))
    if inspect.Parameter.empty not in options.values():
        for callback in build_method(name).callbacks:
            others = [option for option in list_options(callback) if option not in options]
            if others:
                values = _write((option, getattr(callback, option)) for option in others)
                lines.append(f"{type(callback).__name__}: {values}")
    paragraphs = [fill(line, 120, initial_indent="    ", subsequent_indent="    ") for line in lines if line]
    return "\n".join([name, *paragraphs, ""])


def costs_of(text: str) -> dict[str, str]:
    r"""The points of a method's documentation on what it sends, keeps and costs, and for whom it is.

    Args:
        text: The documentation.

    Example:
        >>> costs_of("An average.\n\n- Sends: 1 model down,\n  1 up.\n- Keeps: nothing.")
        {'Sends': '1 model down, 1 up.', 'Keeps': 'nothing.'}

    """
    points = re.findall(r"^- (Sends|Keeps|Costs|For): (.*(?:\n  .*)*)", text, re.MULTILINE)
    return {name: " ".join(value.split()) for name, value in points}


def _write(options: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(option if value is inspect.Parameter.empty else f"{option}={value!r}" for option, value in options)
