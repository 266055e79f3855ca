"""FedFusion against federated averaging: rounds to milestones, accuracies, and clients that were never seen.

Three settings of the paper and a segmentation model, one recipe each, sized for two cores: parts of the data and narrow
networks. Trains what is not trained yet, through `lightning_fed.compare`, and makes the tables of what is there.
Milestones and learning rates belong to these sizes: the paper's 94 % and 95 % are those of all of MNIST and the full
network.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import load_json, machine, parser, prepare, save_json, table, write_section
from torch.utils.data import DataLoader, Subset

from lightning_fed.callbacks import FeatureFusion
from lightning_fed.compare import (
    Method,
    Plan,
    draw,
    epochs_to_converge,
    load_results,
    markdown,
    run_comparison,
    train_newcomers,
)
from lightning_fed.compare.run import CHECKPOINT, Run, quiet
from lightning_fed.data import PartitionedData

ROOT = Path(__file__).parents[1]
METHODS = (
    "fedavg",
    "fedfusion:operator=single",
    "fedfusion:operator=multi",
    "fedfusion:operator=conv",
    "fedfusion:operator=conv:conv_init=local",
)
READINGS = (  # other readings of the paper and its program
    "fedfusion:operator=conv:conv_init=average",
    "fedfusion:operator=conv:conv_bias=false",
    "fedfusion:operator=conv:eval_reference=current",
    "fedfusion:operator=multi:ema=0.0",
    "fedavg:optimizer_state=keep",
    "fedfusion:operator=conv:optimizer_state=keep",
    "fedfusion:operator=conv:conv_init=local:optimizer_state=keep",
)
MONITORS = ("fed/val_acc/mean", "val_acc")  # on each client's own data, as the paper's must be; and on all of them
OF_CLIENTS = "--data.source.data_dir"


@dataclass(frozen=True)
class Study:
    """One setting.

    Args:
        recipe: Its recipe, in ``recipes/``.
        words: The setting, as the report says it.
        milestones: Scores that are to be reached.
        newcomers: Clients that were never seen: how many, and images each, half of them for validation.
        data: The recipe's option for the folder of the data.
        monitors: What is compared: a table for each. The first is that of the milestones.
        methods: The methods.

    """

    recipe: str
    words: str
    milestones: Sequence[float]
    newcomers: tuple[int, int] | None = None
    data: str = OF_CLIENTS
    monitors: Sequence[str] = MONITORS
    methods: Sequence[str] = METHODS


STUDIES = {
    "permuted_mnist": Study(
        "compare_permuted_mnist.yaml",
        "Permuted MNIST (user-specific data; c in the paper): 3 clients of 1,200 images, each with a permutation of its"
        " own, one local epoch; the CNN of McMahan et al. with 8, 16 and 64 units",
        (0.70, 0.75, 0.80),
        (4, 400),
    ),
    "cifar10_classes": Study(
        "compare_cifar10_classes.yaml",
        "CIFAR-10 by classes (artificial non-IID data; a and b in the paper): 5 clients of 800 images, each of two"
        " classes of its own, one local epoch; the paper's CNN with 16, 16, 96 and 48 units",
        (0.5, 0.6, 0.7),
        (4, 400),
    ),
    "cifar10_iid": Study(
        "compare_cifar10_iid.yaml",
        "CIFAR-10, IID (d in the paper): 5 clients of 800 images, one local epoch; the paper's CNN with 16, 16, 96 and"
        " 48 units",
        (0.35, 0.40, 0.45),
        (4, 400),
    ),
    "camvid": Study(
        "compare_camvid.yaml",
        "CamVid at 96x64 (184 frames) with a narrow DeepLabV3+, whose encoder is fused at all levels: 8 clients"
        " (Dirichlet 0.1), 4 in a round, 2 local epochs",
        (0.10, 0.15, 0.20),
        data="--data.data_dir",
        monitors=("val_miou",),
        methods=("fedavg", "fedfusion:operator=multi", "fedfusion:operator=conv:conv_init=local"),
    ),
}


def make_plan(name: str, methods: Sequence[str], arguments: argparse.Namespace) -> Plan:
    data = STUDIES[name].data
    overrides = [data, str(arguments.data)]
    if arguments.quick:
        size = "300" if data == OF_CLIENTS else "40"
        overrides += ["--trainer.max_rounds", "2", data.replace("data_dir", "train_size"), size]
    return Plan(
        recipe=ROOT / "recipes" / STUDIES[name].recipe,
        methods=[Method.parse(text) for text in methods],
        seeds=arguments.seeds,
        out=arguments.runs / "fedfusion" / name,
        monitor=STUDIES[name].monitors[0],
        test=arguments.test,
        overrides=overrides,
    )


# --- rounds to milestones, as in the paper's table 2 ------------------------------------------------------------------


def first_round(run: Mapping[str, Any], milestone: float) -> int | None:
    """The first round, from 1, whose accuracy reaches the milestone."""
    values = [values[run["monitor"]] for values in run["rounds"]]
    return next((number for number, value in enumerate(values, start=1) if value >= milestone), None)


def milestone_table(results: Sequence[Mapping[str, Any]], milestones: Sequence[float]) -> str:
    """Mean rounds over the seeds that reach it, and the mean over seeds of 1 - rounds / rounds of FedAvg."""
    rows = []
    for method in dict.fromkeys(run["method"] for run in results):
        row = [f"`{method}`"]
        for milestone in milestones:
            rounds = {run["seed"]: first_round(run, milestone) for run in results if run["method"] == method}
            base = {run["seed"]: first_round(run, milestone) for run in results if run["method"] == "fedavg"}
            reached = [count for count in rounds.values() if count is not None]
            some = f" ({len(reached)} of {len(rounds)})" if len(reached) < len(rounds) else ""
            cell = f"{statistics.fmean(reached):.1f}{some}" if reached else "never"
            both = [(count, base.get(seed)) for seed, count in rounds.items()]
            shares = [1 - count / other for count, other in both if count is not None and other is not None]
            row += [cell, f"{statistics.fmean(shares):.0%}" if shares and method != "fedavg" else ""]
        rows.append(row)
    return table(["method", *(cell for one in milestones for cell in (f"{one:.0%}", "reduction"))], rows)


# --- clients that were never seen, as in the paper's figure 4 ---------------------------------------------------------


class Unseen(L.LightningDataModule):
    """The test images of another datamodule, for clients that were never seen."""

    def __init__(self, source: Any, count: int) -> None:
        super().__init__()
        self.source, self.count = source, count

    def setup(self, stage: str) -> None:
        self.source.setup("test")

    def train_dataloader(self) -> DataLoader[Any]:
        kept = torch.randperm(len(self.source.test_dataset), generator=torch.Generator().manual_seed(0))[: self.count]
        return DataLoader(Subset(self.source.test_dataset, kept.tolist()), self.source.batch_size, shuffle=True)


def measure_newcomers(plan: Plan, run: Run, study: Study, arguments: argparse.Namespace) -> dict[str, Any]:
    """Accuracies of clients that were never seen, before training and after every epoch; on disk when it is done."""
    folder = plan.out / "runs" / run.name
    path = folder / "newcomers.json"
    known: dict[str, Any] | None = load_json(path)
    if known is not None:
        return known
    assert study.newcomers is not None
    count, size = (2, 40) if arguments.quick else study.newcomers
    with quiet():
        cli = plan.build(run.seed)
        partition = type(cli.datamodule.partition)(**{**vars(cli.datamodule.partition), "num_clients": count})
        unseen = Unseen(cli.datamodule.source, count * size)
        data = PartitionedData(unseen, partition, val_fraction=0.5, seed=1_000 + run.seed)
        data.setup("fit")
        federation = run.method.federation(cli.trainer.federation)
        for callback in federation.client_callbacks:
            if isinstance(callback, FeatureFusion):
                callback.setup(L.Trainer(logger=False, enable_checkpointing=False), cli.model, "validate")
        state = torch.load(folder / CHECKPOINT, weights_only=True)["state_dict"]
        cli.model.load_state_dict(state)
        batch_size = cli.datamodule.source.batch_size
        loaders = {
            client: (DataLoader(data.clients[client], batch_size, shuffle=True), DataLoader(data.val[client], 500))
            for client in data.clients
        }
        epochs = 2 if arguments.quick else arguments.epochs
        curves = train_newcomers(cli.model, loaders, epochs, "val_acc", seed=run.seed)
    found = {"method": run.method.label, "seed": run.seed, "curves": list(curves.values())}
    save_json(path, found)
    print(f"newcomers of {run}: {[epochs_to_converge(curve) for curve in curves.values()]}", flush=True)
    return found


def newcomer_table(found: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for method in dict.fromkeys(one["method"] for one in found):
        seeds = [one["curves"] for one in found if one["method"] == method]
        epochs = [statistics.fmean(epochs_to_converge(curve) for curve in curves) for curves in seeds]
        values = {
            number: statistics.fmean(curve[min(number, len(curve) - 1)] for curves in seeds for curve in curves)
            for number in (0, 1, 5, 10)
        }
        best = statistics.fmean(max(curve) for curves in seeds for curve in curves)
        spread = f" ± {statistics.stdev(epochs):.1f}" if len(epochs) > 1 else ""
        shown = [f"{value:.3f}" for value in (*values.values(), best)]
        rows.append([f"`{method}`", f"{statistics.fmean(epochs):.1f}{spread}", *shown])
    return table(["method", "epochs to converge", "before", "after 1", "after 5", "after 10", "best"], rows)


# --- the report -------------------------------------------------------------------------------------------------------


def report(
    name: str, results: Sequence[Mapping[str, Any]], newcomers: Sequence[Mapping[str, Any]], arguments: Any
) -> str:
    study = STUDIES[name]
    readings = [Method.parse(text).label for text in READINGS]
    main = [run for run in results if run["method"] not in readings]
    parts = [
        f"`python benchmarks/fedfusion.py --data DATA --studies {name} --out docs/results.md`. {study.words};"
        f" `recipes/{study.recipe}`. {machine(arguments.threads)}.",
        f"Rounds until `{study.monitors[0]}` reaches a milestone, mean over seeds, and the reduction against `fedavg`:",
        milestone_table(main, study.milestones),
    ]
    for monitor in study.monitors:
        parts.append(markdown([{**run, "monitor": monitor} for run in main], last=arguments.last))
    if len(main) < len(results):
        parts += [
            "Other readings of the paper and of the authors' program:",
            milestone_table(results, study.milestones),
        ]
        parts.append(markdown(results, last=arguments.last))
    if newcomers and study.newcomers is not None:
        count, size = study.newcomers
        parts += [
            f"Clients that were never seen ({count} for each seed, {size // 2} test images each to train on and as many"
            " to be evaluated on) train the last global model; epochs until the accuracy is within half a point of its"
            " best, and accuracies:",
            newcomer_table(newcomers),
        ]
    return "\n\n".join(parts)


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--studies", nargs="+", default=list(STUDIES), choices=list(STUDIES), help="settings")
    made.add_argument("--methods", nargs="+", default=[], metavar="METHOD", help="of those of the study; else all")
    made.add_argument("--readings", action="store_true", help="train the other readings too")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds")
    made.add_argument("--epochs", type=int, default=50, help="local epochs of clients that were never seen; 0 for none")
    made.add_argument("--last", type=int, default=5, help="rounds at the end whose mean is the score")
    made.add_argument("--test", action="store_true", help="evaluate finished runs on the test data (do this once)")
    made.add_argument("--report", action="store_true", help="only make the tables of what is there")
    made.add_argument("--figures", type=Path, default=None, help="folder for the PNG files of the curves")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.seeds = [0]
    for name in arguments.studies:
        results, newcomers = [], []
        study = STUDIES[name]
        known = [text for text in study.methods if not arguments.methods or text in arguments.methods]
        for methods in (known, READINGS if arguments.readings and study.newcomers else ()):
            if not methods:
                continue
            plan = make_plan(name, methods, arguments)
            if not arguments.report:
                print(name, flush=True)
                run_comparison(plan)
            found = load_results(plan)
            results += found
            if methods is READINGS or not arguments.epochs or study.newcomers is None:
                continue
            for result in found:
                run = Run(Method.parse(result["method"]), result["seed"], result["stragglers"])
                path = plan.out / "runs" / run.name / "newcomers.json"
                if arguments.report and not path.exists():
                    continue
                newcomers.append(measure_newcomers(plan, run, study, arguments))
        if not results:
            continue
        if arguments.figures is not None:
            arguments.figures.mkdir(parents=True, exist_ok=True)
            readings = [Method.parse(text).label for text in READINGS]
            curves = [run for run in results if run["method"] not in readings]
            draw(curves, arguments.figures / f"fedfusion_{name}.png", last=arguments.last)
        write_section(arguments.out, f"fedfusion-{name}", report(name, results, newcomers, arguments))


if __name__ == "__main__":
    main()
