"""``lightning-fed recipes``: lists or prints the package's recipes (training configurations)."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from textwrap import fill, indent

from lightning_fed.argument_checks import check_option

MODEL_OPTIONS = (
    "Options for model and data: -c RECIPE, --model CLASS, --model.NAME VALUE, --data CLASS, --data.NAME VALUE, and "
    "--seed_everything SEED for the data's random numbers (default: 0). `lightning-fed fit --model.help CLASS` shows "
    "the names."
)


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed recipes`` with the command-line arguments ``args``."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed recipes",
        description="List the packaged recipes, or print one: lightning-fed recipes shapes_deeplab > my_recipe.yaml",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe to print (default: list all)")
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


def split_options(args: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Splits command-line arguments at ``--``. Later arguments belong to ``lightning-fed fit``."""
    end = args.index("--") if "--" in args else len(args)
    return args[:end], args[end + 1 :]


def split_model_options(args: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Splits a command line into the command's arguments and the options for model and data.

    Example:
        >>> split_model_options(["a.ckpt", "--model.width", "5", "--data=Shapes", "--num_batches", "2"])
        (['a.ckpt', '--num_batches', '2'], ['--model.width', '5', '--data=Shapes'])
    """
    command: list[str] = []
    model: list[str] = []
    remaining = iter(args)
    for arg in remaining:
        if re.match(r"(-c|--(config|recipe|model|data|seed_everything))(?![\w-])", arg):
            model += [arg] if "=" in arg else [arg, *islice(remaining, 1)]
        else:
            command.append(arg)
    return command, model


def absent_recipe(args: Sequence[str]) -> str | None:
    """Looks for a missing recipe file in the arguments. Returns a hint if the package has the recipe, else ``None``."""
    # Guides use paths of recipes in the repository, but an installed package has another folder.
    for argument in args:
        path = Path(argument.rpartition("=")[2])
        if path.suffix == ".yaml" and not path.exists() and (recipe_folder() / path.name).is_file():
            return (
                f"The package contains this recipe. To copy it: lightning-fed recipes {path.stem} > {path.name}\nThen "
                f"use {path.name} instead of {path}.\n"
            )
    return None


def recipe_folder() -> Path:
    """Folder of the recipes in the package, or in a clone of the repository."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def title_of(recipe: Path) -> str:
    """Returns the first sentence of the comment at the start of a recipe file."""
    comment = []
    for line in recipe.read_text().splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return " ".join(comment).partition(". ")[0].removesuffix(".")
