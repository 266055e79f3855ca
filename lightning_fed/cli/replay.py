"""``lightning-fed replay``: repeats the aggregation of a round from stored updates (callback ``KeepRounds``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed replay`` with ``args``. Exits with status 1 if the result is not the recorded model."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed replay",
        description="Repeat the aggregation of a round from the updates kept by the callback `KeepRounds`.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the callback's folder")
    parser.add_argument("round", type=int, metavar="ROUND", help="the round, from 1, as in the log")
    parser.add_argument("--without", nargs="+", default=[], metavar="SITE", help="clients to leave out")
    parser.add_argument("--rule", help="another method, by name, with the same update steps")
    parser.add_argument("--recipe", type=Path, help="the run's recipe (default: the method's default options)")
    options = parser.parse_args(args)
    # Imports torch: only after the parser, so errors and help are fast.
    from lightning_fed.backends.kept_rounds.kept_round import load_round, replay_round
    from lightning_fed.callbacks.federation import Federation
    from lightning_fed.messages import digest
    from lightning_fed.model.entries import distance

    content, updates = load_round(options.run, options.round - 1)
    federation = Federation(content["method"])
    if options.recipe is not None:
        from lightning_fed.cli.recipe_halves import read_recipe

        federation = read_recipe(options.recipe).federation
    if options.rule is not None:
        federation = federation.replace(method=options.rule)
    without = [update.client for update in updates if str(update.client) in options.without]
    missing = set(options.without) - {str(client) for client in without}
    if missing:
        raise FileNotFoundError(
            f"Expected `--without` to name clients with a stored update in round {options.round}, but no update is "
            f"from {sorted(missing)}: check the names."
        )
    recorded, repeated = replay_round(options.run, options.round - 1, federation, without)
    is_equal = digest(recorded) == digest(repeated)
    length = distance(repeated, recorded, list(recorded))
    sys.stdout.write(
        f"Round {options.round}: {len(updates)} updates; recorded model {digest(recorded)}, repeated model "
        f"{digest(repeated)}: {'equal' if is_equal else f'different, distance {length}'}.\n"
    )
    if not (is_equal or without or options.rule):
        raise SystemExit(1)
