"""Helpers for imports: public names at first use, optional features, and Lightning under two package names."""

from __future__ import annotations

import ast
import difflib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}

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
    """Imports an optional feature. If the import fails, logs a warning and returns ``None``."""
    try:
        return load_feature(module)
    except ModuleNotFoundError as error:
        _log.warning("%s", error)
        return None


def attach_names(package: str, door: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Creates ``__getattr__``, ``__dir__`` and ``__all__`` of a package that imports names at first access.

    ``package`` is the package's ``__name__``, and ``door`` the path of ``__init__.py``. The stub ``__init__.pyi`` lists
    public names as ``from x import y as y``.
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


def unite_names() -> None:
    """Makes ``lightning.pytorch`` and ``pytorch_lightning`` refer to the package that is imported first.

    Both packages contain the same code, but a Trainer rejects modules and callbacks from the other package. Nothing
    changes if both packages are already imported, or have different versions.
    """
    if installed_version("lightning") != installed_version("pytorch-lightning"):
        return
    aliases: dict[str, str] = {}
    for name, twin in NAMES.items():
        if twin not in sys.modules and name in sys.modules:
            aliases[twin] = name
        elif name not in sys.modules:
            aliases[name] = twin
    sys.meta_path.insert(0, _Aliases(aliases))


def refuse_foreign(*objects: Any) -> None:
    """Raises ``TypeError`` for objects whose class is from ``pytorch_lightning`` instead of ``lightning``."""
    for value in objects:
        for base in type(value).__mro__:
            if base.__module__.partition(".")[0] == "pytorch_lightning" and not _is_one():
                raise TypeError(
                    f"Expected objects from the package `lightning`, but got {type(value).__name__}, a {base.__name__}"
                    f" from the package `pytorch_lightning`. {_advice()}"
                )


@cache
def warn_of_two() -> None:
    """Warns once if the incompatible packages ``lightning`` and ``pytorch_lightning`` are both imported."""
    if "pytorch_lightning" in sys.modules and not _is_one():
        _log.warning(
            "Both `lightning` and `pytorch_lightning` are imported: two packages with the same code. `Federation` needs"
            ' `lightning`; a Trainer from `pytorch_lightning` refuses `Federation` ("Expected a parent").'
            " %s",
            _advice(),
        )


def _is_one() -> bool:
    return sys.modules.get("pytorch_lightning") is sys.modules.get("lightning.pytorch")


def _advice() -> str:
    versions = {name: installed_version(name) for name in ("lightning", "pytorch-lightning")}
    if len({*versions.values()}) > 1:
        return f"Install the same version of both packages: got {versions}."
    return "Import only one of the packages, or import `lightning_fed` before the second package, to unify both names."


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed package; ``None`` if the package is missing."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


class _Aliases(MetaPathFinder, Loader):
    """Import hook that returns one package for two names, such as ``lightning.pytorch`` and ``pytorch_lightning``."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if self._imported_name(fullname) is None else spec_from_loader(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        imported = self._imported_name(spec.name)
        assert imported is not None
        module = import_module(imported)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module is already executed; only the original spec is restored.
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)

    def _imported_name(self, fullname: str) -> str | None:
        for name, imported in self._names.items():
            if fullname == name or fullname.startswith(f"{name}."):
                return imported + fullname[len(name) :]
        return None


unite_names()
