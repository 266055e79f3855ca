"""Methods for client drift and personal models, on the published comparisons from NIID-Bench and PFLlib.

The script trains missing runs through `lightning_fed.compare`, and prints published numbers next to the results.
Nothing is tuned: learning rates, momentum, batch sizes and clients are from the publications. Each study's description
names reduced settings; `--full` uses the published sizes.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import PAIRED, paired, parser, prepare, spread, table, version, write_section

from lightning_fed.compare import MethodChoice, Plan, load_results, run_comparison

ROOT = Path(__file__).parents[1]
NIID_METHODS = ("fedavg", "fedprox:mu=0.01", "scaffold", "scaffold:weighting=examples", "fednova")
PERSONAL_METHODS = (
    "fedavg",
    "fedprox:mu=0.001",
    "ditto:lam=0.1",
    "fedper",
    "fedrep:head_epochs=1:body_epochs=1:local_epochs=2",
    "fedala",
)


@dataclass(frozen=True)
class Study:
    """A published comparison.

    Args:
        recipe: Recipe in ``recipes/``.
        words: Description of the setting for the report, with all reductions.
        source: Publication.
        data: The recipe's option for the data folder.
        methods: The methods.
        monitor: Compared metric.
        small: Recipe arguments for the reduced setting.
        variants: Name to further recipe arguments.
        published: Variant and method to published accuracy, in percent.
        seeds: Seeds.
        rounds: Rounds in the reduced setting.
    """

    recipe: str
    words: str
    source: str
    data: str
    methods: Sequence[str]
    monitor: str
    small: Sequence[str]
    variants: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"": ()})
    published: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    seeds: Sequence[int] = (0, 1, 2)
    rounds: int = 0


STUDIES = {
    "niid_cifar10": Study(
        "compare_niid_cifar10.yaml",
        "CIFAR-10, 10 clients, all in every round, NIID-Bench's CNN, batches of 64, SGD of 0.01 with momentum 0.9. In"
        " small: 10,000 images for 45,000, {rounds} rounds for 50, 2 local epochs for 10",
        "Flower's baseline `niid_bench` (50 rounds of 10 epochs, 3 seeds)",
        "--data.data_dir",
        NIID_METHODS,
        "val_acc",
        ("--data.train_size", "10000", "--trainer.max_rounds", "20", "--trainer.local_epochs", "2"),
        {
            "IID": ("--trainer.partition", "IID", "--trainer.partition.num_clients", "10"),
            "Dirichlet 0.5": (),
            "2 labels": (
                *("--trainer.partition", "LabelsPerClient", "--trainer.partition.num_clients", "10"),
                *("--trainer.partition.labels_per_client", "2"),
            ),
        },
        {
            "IID": {"fedavg": "71.32", "scaffold": "71.66", "fedprox": "71.26", "fednova": "70.69"},
            "Dirichlet 0.5": {"fedavg": "62.47", "scaffold": "68.08", "fedprox": "65.63", "fednova": "63.89"},
            "2 labels": {"fedavg": "51.17", "scaffold": "49.42", "fedprox": "50.44", "fednova": "46.9"},
        },
    ),
    "niid_fashion_mnist": Study(
        "compare_niid_fashion_mnist.yaml",
        "Fashion-MNIST, 10 clients, all in every round, NIID-Bench's CNN, batches of 64, SGD of 0.01 with momentum 0.9;"
        " all images, 50 rounds. In small: 2 local epochs for 10",
        "Flower's baseline `niid_bench` (50 rounds of 10 epochs, 3 seeds)",
        "--data.data_dir",
        NIID_METHODS,
        "val_acc",
        ("--trainer.local_epochs", "2"),
        {"Dirichlet 0.5": ()},
        {"Dirichlet 0.5": {"fedavg": "88.09", "scaffold": "88.44", "fedprox": "88.15", "fednova": "88.22"}},
        seeds=(0, 1),
    ),
    "pfl_fashion_mnist": Study(
        "compare_pfl_fashion_mnist.yaml",
        "Fashion-MNIST (the 60,000 training images; PFLlib has the test images too), 20 clients by Dirichlet 0.1, all"
        " in every round, a quarter of each held out, PFLlib's CNN, batches of 10, SGD of 0.005, one local epoch"
        " (FedRep and Ditto one more). In small: 12,000 images, 60 rounds for 2,000. A client's score is that of its"
        " own model, and all clients weigh the same (PFLlib weighs them by their test images)",
        "PFLlib's leaderboard (2,000 rounds; the best one)",
        "--data.source.data_dir",
        PERSONAL_METHODS,
        "fed/val_acc/mean",
        ("--data.source.train_size", "12000", "--trainer.max_rounds", "60"),
        {"Dirichlet 0.1": ()},
        {
            "Dirichlet 0.1": {
                "fedavg": "85.85",
                "fedprox": "85.63",
                "ditto": "97.47",
                "fedper": "97.44",
                "fedrep": "97.56",
            }
        },
        seeds=(0, 1),
        rounds=60,
    ),
}
TWO_EPOCHS = ("ditto", "fedrep")  # methods with two local epochs per round instead of one


def make_plans(name: str, variant: str, arguments: argparse.Namespace) -> list[Plan]:
    """Returns the plan; with `--equal-steps` separate plans for methods with one and with two epochs per round."""
    methods = arguments.methods or STUDIES[name].methods
    if not arguments.equal_steps:
        return [make_plan(name, variant, arguments, methods, arguments.rounds)]
    long = [text for text in methods if text.startswith(TWO_EPOCHS)]
    short = [text for text in methods if text not in long]
    parts = ((short, 0), (long, STUDIES[name].rounds // 2))
    return [make_plan(name, variant, arguments, some, rounds) for some, rounds in parts if some]


def make_plan(name: str, variant: str, arguments: argparse.Namespace, methods: Sequence[str], rounds: int) -> Plan:
    study = STUDIES[name]
    overrides = [study.data, str(arguments.data), *study.variants[variant]]
    overrides += [] if arguments.full else study.small
    if arguments.quick:
        nested = "source." if "source" in study.data else ""
        overrides += [f"--data.{nested}train_size", "1000", "--trainer.max_rounds", "1", "--trainer.local_epochs", "1"]
    overrides += ["--trainer.max_rounds", str(rounds)] if rounds else []
    length = [f"{rounds}_rounds"] if rounds else []
    folder = "_".join([name, *variant.lower().split(), *(["full"] if arguments.full else []), *length])
    return Plan(
        recipe=ROOT / "recipes" / study.recipe,
        methods=[MethodChoice.parse(text) for text in methods],
        seeds=arguments.seeds or study.seeds,
        out=arguments.runs / "drift" / folder,
        monitor=study.monitor,
        overrides=overrides,
    )


def score(run: Mapping[str, Any], monitor: str, last: int, megabytes: float = math.inf) -> float:
    """Mean over the last rounds within a budget of transmitted megabytes, in percent."""
    values = [values[monitor] for values in run["rounds"] if monitor in values and megabytes_of(values) <= megabytes]
    return 100 * statistics.fmean(values[-last:])


def megabytes_of(values: Mapping[str, float]) -> float:
    return (values["comm/total_up_bytes"] + values["comm/total_down_bytes"]) / 1e6


def against_fedavg(scores: Mapping[str, Mapping[int, float]], method: str) -> list[str]:
    """Score of a method, and difference to federated averaging."""
    own, others = scores[method], scores.get("fedavg", {})
    apart = [value - others[seed] for seed, value in own.items() if seed in others and method != "fedavg"]
    return [spread(list(own.values()), 2), paired(apart, 2)]


def report(name: str, results: Mapping[str, Sequence[Any]], arguments: argparse.Namespace) -> str:
    study = STUDIES[name]
    command = f"python benchmarks/drift.py --data DATA --studies {name}{' --full' if arguments.full else ''}"
    given = {key: getattr(arguments, key) for key in ("variants", "methods", "seeds")}
    command += "".join(f" --{key} {shlex.join(map(str, values))}" for key, values in given.items() if values)
    command += f" --rounds {arguments.rounds}" if arguments.rounds else ""
    command += " --equal-steps" if arguments.equal_steps else ""
    words = study.words.format(rounds=arguments.rounds or 20)
    words += "; here FedRep and Ditto have half of the rounds: as many client steps" if arguments.equal_steps else ""
    parts = [
        f"`{command} --out benchmarks/results/drift.md`. {words}; `recipes/{study.recipe}`."
        f" Published: {study.source}. `{study.monitor}` in percent, mean over the last {arguments.last} rounds, ±"
        " standard deviation over seeds."
        f" With equal bytes: the last {arguments.last} rounds that the bytes of the cheapest method pay, both ways."
        f" {PAIRED} Version {version()}."
    ]
    header = ["method", "here", "minus FedAvg", "MB", "with equal bytes", "minus FedAvg"]
    header += ["place", "published", "place there", "seeds"]
    for variant, runs in results.items():
        sent = {run["method"]: megabytes_of(run["rounds"][-1]) for run in runs}
        scores: dict[str, dict[int, float]] = {}
        early: dict[str, dict[int, float]] = {}
        for run in runs:
            at = run["seed"], study.monitor, arguments.last
            scores.setdefault(run["method"], {})[at[0]] = score(run, *at[1:])
            early.setdefault(run["method"], {})[at[0]] = score(run, *at[1:], 1.001 * min(sent.values()))
        published = study.published.get(variant, {})
        ours = sorted(scores, key=lambda method: -statistics.fmean(scores[method].values()))
        theirs = sorted(published, key=lambda method: -float(published[method]))
        rows = []
        for method, values in scores.items():
            known = method.partition(":")[0]
            place = str(theirs.index(known) + 1) if known in theirs else ""
            cells = [*against_fedavg(scores, method), f"{sent[method]:.0f}", *against_fedavg(early, method)]
            cells += [str(ours.index(method) + 1), published.get(known, ""), place, len(values)]
            rows.append([f"`{method}`", *cells])
        parts += [f"**{variant}**"] if variant else []
        parts.append(table(header, rows))
    return "\n\n".join(parts)


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--studies", nargs="+", default=list(STUDIES), choices=list(STUDIES), help="comparisons")
    made.add_argument("--methods", nargs="+", default=[], metavar="METHOD", help="else those of the study")
    made.add_argument("--variants", nargs="+", default=[], metavar="SPLIT", help="else those of the study")
    made.add_argument("--seeds", type=int, nargs="+", default=[], help="else those of the study")
    made.add_argument("--last", type=int, default=3, help="rounds at the end whose mean is the score")
    made.add_argument("--rounds", type=int, default=0, help="rounds; 0 for those of the study")
    made.add_argument("--equal-steps", action="store_true", help="half of the rounds where these have two epochs")
    made.add_argument("--full", action="store_true", help="as long as the publications, with all images")
    made.add_argument("--report", action="store_true", help="only make the tables of what is there")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.seeds = [0]
    for name in arguments.studies:
        results: dict[str, list[Any]] = {}
        for variant in STUDIES[name].variants:
            if arguments.variants and variant not in arguments.variants:
                continue
            runs = []
            for plan in make_plans(name, variant, arguments):
                if not arguments.report:
                    print(f"{name} {variant}".strip(), flush=True)
                    run_comparison(plan)
                runs += load_results(plan)
            if runs:
                results[variant] = runs
        if results:
            length = f"-{arguments.rounds}" if arguments.rounds else ""
            length += "-equal-steps" if arguments.equal_steps else ""
            write_section(arguments.out, f"drift-{name}{length}", report(name, results, arguments))


if __name__ == "__main__":
    main()
