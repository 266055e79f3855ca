"""``lightning-fed rehearse``: simulates the deployment of a recipe, with faults."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fed.report.terminal import draw_tables

if TYPE_CHECKING:
    from lightning_fed.backends.rehearsal.rehearsal import Plan


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed rehearse`` with the command-line arguments ``args``."""
    parser = _parser()
    options = parser.parse_args(args)
    if options.seeds < 1:
        parser.error(f"Expected `--seeds` to be at least 1, but got {options.seeds}.")
    # Imports torch: only after the parser, so errors and help are fast.
    from lightning_fed.backends.rehearsal.rehearsal import rehearse
    from lightning_fed.backends.rehearsal.summary import rank_outcomes, write_log, write_summary

    plan = _read_plan(parser, options)
    if options.seed is not None:
        outcome = rehearse(plan, options.seed)
        sys.stdout.write(f"{write_log(outcome)}\n")
        for text in [*outcome.violations, *([outcome.failure] if outcome.failure else [])]:
            sys.stdout.write(f"{text}\n")
        raise SystemExit(1 if outcome.violations else 0)
    outcomes = [rehearse(plan, seed) for seed in range(options.seeds)]
    options.out.mkdir(parents=True, exist_ok=True)
    for outcome in rank_outcomes(outcomes)[:3]:
        (options.out / f"seed_{outcome.seed}.log").write_text(f"{write_log(outcome)}\n")
    text = write_summary(plan, outcomes)
    (options.out / "rehearsal.md").write_text(f"{text}\n")
    sys.stdout.write(f"{draw_tables(text)}\n\nThe summary and the logs of the worst seeds: {options.out}\n")
    if any(outcome.violations for outcome in outcomes):
        raise SystemExit(1)


def _read_plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Plan:
    from lightning_fed.backends.rehearsal.profiles import Sites, read_sites
    from lightning_fed.backends.rehearsal.rehearsal import Plan
    from lightning_fed.cli.recipe_halves import read_recipe
    from lightning_fed.messages import tensor_bytes

    try:
        sites = read_sites(options.sites)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    recipe = read_recipe(options.recipe)
    federation, rounds = recipe.federation, options.rounds or recipe.server_trainer["max_epochs"]
    if options.train:
        from lightning_fed.backends.wire.data import read_data

        clients = read_data(federation, recipe.data)[0].clients
        if len(clients) != len(sites.sites):
            parser.error(f"Expected {len(clients)} sites, one per client of the recipe, but got {len(sites.sites)}.")
        sites = Sites(
            sites.server, dict(zip(clients, sites.sites.values(), strict=True)), sites.deadline, sites.patience
        )
        return Plan(
            sites, lambda: federation.replace(), rounds, model=lambda: copy.deepcopy(recipe.model),
            data=lambda client: recipe.data, trains=True,
            trainer={**recipe.client_trainer, "accelerator": "cpu", "logger": False},
        )  # fmt: skip
    wanted = federation.schedule.clients_per_round
    count = min(wanted, len(sites.sites)) if isinstance(wanted, int) else wanted
    names = ("local_epochs", "local_steps", "availability", "faults", "steps")
    arguments = {name: federation.arguments[name] for name in names} | {
        "clients_per_round": count,
        "seed": federation.seed,
    }
    return Plan(
        sites, lambda: type(federation)(**arguments), rounds, model_bytes=tensor_bytes(recipe.model.state_dict())
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-fed rehearse",
        description="Rehearse a deployment in virtual time, with the real server and client programs: rounds, hours,"
        " megabytes, excluded clients, and a suggested deadline. Seeds draw the faults. By default no client trains: an"
        " update of eight numbers travels with the recipe's number of bytes, under FedAvg with the recipe's steps.",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="the recipe, a YAML file")
    parser.add_argument("--sites", type=Path, required=True, help="profiles of server and sites, a TOML file")
    parser.add_argument("--seeds", type=int, default=1000, help="number of rehearsals (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="rehearse only this seed, and print all events")
    parser.add_argument("--rounds", type=int, help="number of rounds (default: the recipe's)")
    parser.add_argument(
        "--train", action="store_true", help="train the recipe's model with the recipe's method and data (slow)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/rehearsal"), help="folder for summary and logs (default: %(default)s)"
    )
    return parser
