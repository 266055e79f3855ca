"""``lightning-fed privacy``: computes the privacy budget of a recipe, without training."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml  # type: ignore[import-untyped]

from lightning_fed.cli.recipes import split_options
from lightning_fed.console import markdown_table
from lightning_fed.errors import OptionError
from lightning_fed.report.terminal import draw_tables

if TYPE_CHECKING:
    from lightning_fed.cli.recipe_halves import Recipe
    from lightning_fed.privacy.accounting import Budget
    from lightning_fed.privacy.central import CentralDP

_NO_PRIVACY = "Expected a recipe with `CentralDP` among the `steps` of `trainer`, but got none."
_CANARIES = 1000
_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed privacy`` with the command-line arguments ``args``."""
    command_args, fit_args = split_options(args)
    options = _parser().parse_args(command_args)
    if not fit_args and not _has_steps(options.recipe):
        raise OptionError(_NO_PRIVACY)  # before torch is imported
    from lightning_fed.cli.recipe_halves import read_recipe

    recipe = read_recipe(options.recipe, fit_args)
    sys.stdout.write(draw_tables(describe_privacy(recipe, options.audit)))
    if options.figure is not None:
        draw_epsilon(recipe, options.figure)


def _has_steps(recipe: Path) -> bool:
    trainer = (yaml.safe_load(recipe.read_text()) or {}).get("trainer") or {}
    # Update steps can come from `steps`, a federation object or a custom method.
    method = str(trainer.get("method", "")).partition(":")[0]
    return bool(trainer.get("steps") or trainer.get("federation") or "." in method)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-fed privacy",
        usage="lightning-fed privacy RECIPE [--audit] [--figure FILE] [-- options of fit]",
        description="Compute the privacy budget of a recipe, without training: epsilon by round, the noise relative "
        "to the clipping norm, and the noise for other budgets.",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="the recipe, a YAML file")
    parser.add_argument("--audit", action="store_true", help="also audit the noise with canary clients")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw epsilon over the rounds; needs matplotlib")
    return parser


def describe_privacy(recipe: Recipe, has_audit: bool = False) -> str:
    """Formats a recipe's privacy budget as Markdown tables. ``has_audit`` adds a lower bound from simulated attacks."""
    from lightning_fed.privacy.accounting import calibrate
    from lightning_fed.privacy.audit import audit_mean

    privacy, budget, rounds = _plan(recipe)
    population, cohort = budget.population, budget.cohort
    num_parameters = sum(parameter.numel() for parameter in recipe.model.parameters())
    std = budget.noise_multiplier * privacy.clip * (1 if privacy.sampling == "poisson" else 2)

    def needed(epsilon: float) -> float:
        accounted = (budget.delta, population, cohort, rounds, budget.sampling, budget.accountant)
        return calibrate(epsilon, *accounted).noise_multiplier

    parts = [
        f"{cohort} of {population} clients in a round ({budget.sampling}), {rounds} rounds, delta {budget.delta:g}"
        f" ({budget.accountant})",
        f"noise multiplier {budget.noise_multiplier:.4g}, clip {privacy.clip:g}: the noise in a round's sum has "
        f"standard deviation {std:.4g} per coordinate, and norm {std * math.sqrt(num_parameters):.3g} over "
        f"{num_parameters:,} parameters; for comparison, {cohort} equal updates at the clipping norm have a sum with "
        f"norm {cohort * privacy.clip:g}",
        markdown_table(
            [
                ["rounds", "epsilon"],
                *([f"{number}", f"{budget.epsilon(number):.4g}"] for number in _some_rounds(rounds)),
            ]
        ),
        markdown_table(
            [
                [f"epsilon after {rounds} rounds", "noise multiplier"],
                *([f"{epsilon:g}", f"{needed(epsilon):.4g}"] for epsilon in _EPSILONS),
            ]
        ),
    ]
    if has_audit:
        audit = audit_mean(budget, rounds, min(population, _CANARIES))
        parts.append(
            f"audit with {audit.num_canaries} canary clients: {audit.num_correct} of {audit.num_guesses} guesses were "
            f"correct, so epsilon is at least {audit.lower_bound:.4g} (95 % confidence); the budget claims "
            f"{audit.claimed:.4g}"
        )
    return "\n\n".join(parts) + "\n"


def draw_epsilon(recipe: Recipe, path: Path) -> None:
    """Draws epsilon over the rounds, for the recipe's noise, half the noise and twice the noise."""
    from lightning_fed.callbacks.pictures import new_figure
    from lightning_fed.report.figures import INK, save_figure

    privacy, budget, rounds = _plan(recipe)
    numbers = _some_rounds(rounds, 40)
    figure = new_figure((6, 4))
    axes = figure.subplots()
    for factor, style in ((0.5, "--"), (1.0, "-"), (2.0, ":")):
        other = replace(budget, noise_multiplier=factor * budget.noise_multiplier)
        label = f"noise multiplier {other.noise_multiplier:.3g}"
        axes.plot(numbers, [other.epsilon(number) for number in numbers], style, color="C0", label=label)
    if privacy.max_epsilon is not None:
        axes.axhline(privacy.max_epsilon, color=INK, linewidth=0.8, label=f"max_epsilon {privacy.max_epsilon:g}")
    axes.set(xlabel="round", ylabel=f"epsilon (delta {budget.delta:g})", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def _plan(recipe: Recipe) -> tuple[CentralDP, Budget, int]:
    from lightning_fed.backends.wire.data import read_data
    from lightning_fed.privacy.central import CentralDP

    privacy = next((step for step in recipe.federation.server.chain.steps if isinstance(step, CentralDP)), None)
    if privacy is None:
        raise OptionError(_NO_PRIVACY)
    population = len(read_data(recipe.federation, recipe.data)[0].clients)
    rounds = int(recipe.server_trainer["max_epochs"])
    return privacy, privacy.plan(population, recipe.federation.schedule.cohort_size(population), rounds), rounds


def _some_rounds(rounds: int, count: int = 8) -> list[int]:
    return sorted({1, *(math.ceil(rounds * part / count) for part in range(1, count + 1))})
