"""``lightning-fed recipes``: the recipes that come with the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill, indent

from lightning_fed.argument_checks import check_option


def run(args: Sequence[str]) -> None:
    """The command.

    Args:
        args: The command line after ``recipes``.

    """
    parser = _parser()
    options = parser.parse_args(args)
    recipes = {path.stem: path for path in sorted(recipe_folder().glob("*.yaml"))}
    if options.name is None:
        sys.stdout.writelines(f"{name}\n{indent(fill(title_of(path), 96), '    ')}\n" for name, path in recipes.items())
        return
    try:
        check_option("NAME", options.name, list(recipes))
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(recipes[options.name].read_text())


def _parser() -> argparse.ArgumentParser:
    """Parser of the command."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed recipes",
        description="List the ready recipes, or print one: lightning-fed recipes shapes_deeplab > my_recipe.yaml",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe to print (default: list all)")
    return parser


def split_options(args: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """A command's own arguments, and those after ``--``, which are for ``fit``."""
    end = args.index("--") if "--" in args else len(args)
    return args[:end], args[end + 1 :]


def absent_recipe(args: Sequence[str]) -> str | None:
    """A hint for a command line that names a ready recipe by a file that is not there; ``None`` for others.

    The guides name the ready recipes by their files in the repository, which an installed package has elsewhere.

    Args:
        args: The command line after the program's name.

    """
    for argument in args:
        path = Path(argument.rpartition("=")[2])
        if path.suffix == ".yaml" and not path.exists() and (recipe_folder() / path.name).is_file():
            return (
                f"The package has a recipe of this name. To write it: lightning-fed recipes {path.stem} > {path.name}\n"
                f"Then name {path.name} in the place of {path}.\n"
            )
    return None


def recipe_folder() -> Path:
    """Folder of the ready recipes: inside an installed package, beside it in a clone of the repository."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def title_of(recipe: Path) -> str:
    """The first sentence of the comment at the top of a recipe.

    Args:
        recipe: The YAML file.

    """
    comment = []
    for line in recipe.read_text().splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return " ".join(comment).partition(". ")[0].removesuffix(".")
