"""Lazy imports: loads a package's names on first access, and modules of optional features on demand."""

from __future__ import annotations

import ast
import difflib
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_log = logging.getLogger(__name__)


def load_feature(module: str) -> ModuleType:
    """Imports the module of an optional feature. If a requirement is missing, the error names the feature."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("lightning_fed."):
            raise  # another package, for example from an extra
        raise ModuleNotFoundError(
            f"Expected the feature `{error.name}` in the package, but the folder or file is missing:"
            " reinstall lightning-fed.",
            name=error.name,
        ) from error


def find_feature(module: str) -> ModuleType | None:
    """Imports the module of a feature that a fit can omit; without the module, logs a warning and returns ``None``."""
    try:
        return load_feature(module)
    except ModuleNotFoundError as error:
        _log.warning("%s", error)
        return None


def attach_names(package: str, door: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Creates ``__getattr__``, ``__dir__`` and ``__all__`` for a package, to load each name on first access.

    ``package`` and ``door`` are ``__name__`` and ``__file__`` of the package. ``__init__.pyi`` lists the names. A name
    imported there without ``as`` is only for features in this package, and not public.
    """
    sources: dict[str, tuple[str, bool]] = {}  # maps a name to its module, and whether the name is a submodule
    for statement in ast.parse(Path(door).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom):
            module = ".".join(filter(None, [package if statement.level else "", statement.module]))
            sources |= {alias.name: (module, statement.module is None) for alias in statement.names if alias.asname}

    def load(name: str) -> Any:
        if name not in sources:
            near = difflib.get_close_matches(name, sources, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        module, is_module = sources[name]
        value = load_feature(f"{module}.{name}") if is_module else getattr(load_feature(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(sources), sorted(sources)
