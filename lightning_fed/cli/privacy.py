"""``lightning-fed privacy``: the budget of a recipe with differential privacy, before anything trains."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_fed.callbacks.pictures import has_matplotlib
from lightning_fed.cli.data import population_of
from lightning_fed.cli.flower import Recipe, read_recipe
from lightning_fed.cli.recipes import split_options
from lightning_fed.errors import OptionError
from lightning_fed.privacy.accounting import Budget, calibrate, plan_budget
from lightning_fed.privacy.audit import audit_mean
from lightning_fed.privacy.callbacks import simulated_counts
from lightning_fed.privacy.central import CentralDP

_CANARIES = 1000
_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)


def run(args: Sequence[str]) -> None:
    """The command.

    Args:
        args: The command line after ``privacy``.

    Raises:
        OptionError: If the recipe has no differential privacy, or its budget cannot be kept.

    """
    mine, own = split_options(args)
    options = _parser().parse_args(mine)
    recipe = read_recipe(options.recipe, own)
    sys.stdout.write(describe_privacy(recipe, options.audit))
    if options.figure is not None:
        draw_epsilon(recipe, options.figure)


def _parser() -> argparse.ArgumentParser:
    """Parser of the command, for what stands before ``--``."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed privacy",
        usage="lightning-fed privacy RECIPE [--audit] [--figure FILE] [-- options of fit]",
        description="Says what a recipe's rounds cost of the clients' privacy: epsilon round by round, the noise"
        " against the clip, and the noise that other budgets need. Nothing is trained.",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="the recipe, a YAML file")
    parser.add_argument("--audit", action="store_true", help="tell what can be guessed of canary clients, too")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw epsilon over the rounds; needs matplotlib")
    return parser


def describe_privacy(recipe: Recipe, has_audit: bool = False) -> str:
    """The tables of the command, in Markdown.

    Args:
        recipe: The recipe.
        has_audit: Whether its rule is audited, too.

    Raises:
        OptionError: If it has no differential privacy, or its budget cannot be kept.

    """
    privacy, budget, rounds, trained = _plan(recipe)
    population, cohort, is_simulated = budget.population, budget.cohort, privacy.noise_cohort is not None
    setting: Any = (privacy.delta, population, cohort, rounds, privacy.sampling, privacy.accountant)
    num_parameters = sum(parameter.numel() for parameter in recipe.model.parameters())
    std = budget.noise_multiplier * privacy.clip * (1 if privacy.sampling == "poisson" else 2) * trained / cohort
    parts = [
        *([f"**simulated**: {trained} clients train in a round, with the noise of {cohort}"] if is_simulated else []),
        f"{cohort} of {population} clients in a round ({privacy.sampling}), {rounds} rounds, delta {budget.delta:g}"
        f" ({privacy.accountant})",
        f"noise multiplier {budget.noise_multiplier:.4g}, clip {privacy.clip:g}: the noise of a round's sum has a"
        f" standard deviation of {std:.4g} at every coordinate, and with {num_parameters:,} parameters a length of"
        f" about {std * math.sqrt(num_parameters):.3g}; {trained} steps of the clip's length that agree have one of"
        f" {trained * privacy.clip:g}",
        _table(
            "rounds",
            "simulated epsilon" if is_simulated else "epsilon",
            [(f"{number}", budget.epsilon(number)) for number in _some_rounds(rounds)],
        ),
        _table(
            f"epsilon after {rounds} rounds",
            "noise multiplier",
            [(f"{epsilon:g}", calibrate(epsilon, *setting).noise_multiplier) for epsilon in _EPSILONS],
        ),
    ]
    if has_audit:
        audit = audit_mean(budget, rounds, min(population, _CANARIES))
        of_what = " of the simulated budget" if is_simulated else ""
        parts.append(
            f"audit{of_what} with {audit.num_canaries} canary clients: {audit.num_correct} of {audit.num_guesses}"
            f" guesses were right, so that epsilon is at least {audit.lower_bound:.4g} (with a probability of 95 %);"
            f" claimed is {audit.claimed:.4g}"
        )
    return "\n\n".join(parts) + "\n"


def draw_epsilon(recipe: Recipe, path: Path) -> None:
    """Draws epsilon over the rounds, beside those of half the noise and of twice as much.

    Args:
        recipe: The recipe.
        path: The picture's file.

    Raises:
        OptionError: If it has no differential privacy, its budget cannot be kept, or matplotlib is not installed.

    """
    if not has_matplotlib():
        raise OptionError("Expected matplotlib for a figure: pip install 'lightning-fed[demo]'.")
    from matplotlib.figure import Figure  # the extra `demo`

    privacy, budget, rounds, _ = _plan(recipe)
    numbers = sorted({1, *(math.ceil(rounds * part / 40) for part in range(1, 41))})
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for factor, style in ((0.5, "--"), (1.0, "-"), (2.0, ":")):
        other = replace(budget, noise_multiplier=factor * budget.noise_multiplier)
        label = f"noise multiplier {other.noise_multiplier:.3g}"
        axes.plot(numbers, [other.epsilon(number) for number in numbers], style, color="C0", label=label)
    if privacy.max_epsilon is not None:
        axes.axhline(privacy.max_epsilon, color="0.3", linewidth=0.8, label=f"max_epsilon {privacy.max_epsilon:g}")
    name = "epsilon" if privacy.noise_cohort is None else "simulated epsilon"
    axes.set(xlabel="round", ylabel=f"{name} (delta {budget.delta:g})", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)


def _plan(recipe: Recipe) -> tuple[CentralDP, Budget, int, int]:
    """The recipe's protection, its budget, the number of rounds, and that of clients that train in one."""
    privacy = recipe.federation.arguments["privacy"]
    if not isinstance(privacy, CentralDP):
        raise OptionError("Expected a recipe with `privacy: {class_path: CentralDP, ...}` in its `trainer`.")
    population = len(population_of(recipe.data, recipe.federation).clients)
    trained = recipe.federation.schedule.cohort_size(population)
    population, cohort = simulated_counts(population, trained, privacy.noise_population, privacy.noise_cohort)
    rounds = int(recipe.server_trainer["max_epochs"])
    setting: Any = (privacy.delta, population, cohort, rounds, privacy.sampling, privacy.accountant)
    return privacy, plan_budget(privacy.noise_multiplier, privacy.epsilon, *setting), rounds, trained


def _some_rounds(rounds: int) -> list[int]:
    return sorted({1, *(math.ceil(rounds * part / 8) for part in range(1, 9))})


def _table(left: str, right: str, rows: Sequence[tuple[str, float]]) -> str:
    lines = [f"| {left} | {right} |", "|---:|---:|", *(f"| {name} | {value:.4g} |" for name, value in rows)]
    return "\n".join(lines)
