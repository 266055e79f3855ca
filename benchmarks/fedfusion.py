"""FedFusion compared with federated averaging: rounds to milestones, accuracies, and unseen clients.

The settings are from the paper, plus a segmentation model, reduced for two cores: parts of the data and narrow
networks. The script trains missing runs through `lightning_fed.compare`, one after another; a repeated command resumes.

`--tune` chooses the learning rate once, with federated averaging, by the validation score under a separate seed; all
methods use this rate. Milestones are fractions of federated averaging's final score, because the paper's milestones
(94 % and 95 % with a final 95.2 %) require all of MNIST and the full network.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import fusion_control
import newcomers
import tuning
from common import PAIRED, load_json, machine, paired, parser, picture, prepare, spread, table, write_section

from lightning_fed.compare import MethodChoice, Plan, draw, load_results, run_comparison, summarize
from lightning_fed.compare.run import Run

ROOT = Path(__file__).parents[1]
CONV, LOCAL = "fedfusion:operator=conv", "fedfusion:operator=conv:conv_init=local"
METHODS = ("fedavg", "fedfusion:operator=single", "fedfusion:operator=multi", CONV, LOCAL)
CONTROL = "fedavg, 1x1 convolution"  # only the operator's layer
READINGS = (  # alternatives for differences and gaps in the paper and the published program
    f"{CONV}:conv_init=average",
    f"{CONV}:conv_bias=false",
    f"{CONV}:eval_reference=current",
    "fedfusion:operator=multi:ema=0.0",
    "fedavg:optimizer_state=keep",
    f"{CONV}:optimizer_state=keep",
)
KEPT = ":optimizer_state=keep"  # the baseline keeps the optimizer state, too
SHARES = (0.90, 0.95, 0.99)  # milestones as fractions of federated averaging's score
MONITORS = ("fed/val_acc/mean", "clients/local/val_acc", "val_acc")
OF_CLIENTS = "--data.source.data_dir"
LABELS_OF_TWO = (  # even and odd digits, as in the published program
    '{"class_path": "LabelsPerClient", "init_args": {"num_clients": 2, "labels_per_client": 5, "assignment": "even"}}'
)
PROGRAM = (  # the authors' program, except for the network
    *("--data.partition.partition", LABELS_OF_TWO),
    *("--data.source.train_size", "15000", "--data.source.batch_size", "64", "--data.source.augment", "true"),
    *("--model.lr", "0.002", "--trainer.local_epochs", "5", "--trainer.max_rounds", "60"),
)
PROGRAM_METHODS = tuple(f"{name}{KEPT}" for name in ("fedavg", CONV, LOCAL, "fedfusion:operator=multi"))
PROGRAM_MONITORS = ("clients/local/val_acc", "fed/val_acc/mean", "val_acc")


@dataclass(frozen=True)
class Study:
    """A setting.

    Args:
        recipe: Recipe in ``recipes/``.
        words: Description for the report.
        rates: Candidate learning rates; empty for the recipe's rate.
        methods: The methods.
        readings: Further methods for ``--readings``.
        newcomers: Number of unseen clients and images per client; half of the images are for validation.
        monitors: Compared metrics; with several metrics, the last metric has no milestones.
        overrides: Recipe options.
        rate_of: Name of the study with the tuned learning rate.
        has_control: Whether to train a network with the operator's layer, but without the operator.
        data: The recipe's option for the data folder.
    """

    recipe: str
    words: str
    rates: Sequence[float] = ()
    methods: Sequence[str] = METHODS
    readings: Sequence[str] = ()
    newcomers: tuple[int, int] | None = None
    monitors: Sequence[str] = MONITORS
    overrides: Sequence[str] = ()
    rate_of: str = ""
    data: str = OF_CLIENTS
    has_control: bool = True


STUDIES = {
    "permuted_mnist": Study(
        "compare_permuted_mnist.yaml",
        "Permuted MNIST (user-specific data; c in the paper): 3 clients of 1,200 images, each with a permutation of its"
        " own, one local epoch; the CNN of McMahan et al. with 8, 16 and 64 units",
        rates=(0.02, 0.05, 0.1),
        readings=READINGS,
        newcomers=(3, 400),
    ),
    "permuted_mnist_5_epochs": Study(
        "compare_permuted_mnist.yaml",
        "The same with five local epochs, as in the authors' program",
        methods=("fedavg", f"{CONV}:cache_global_features=true", f"{LOCAL}:cache_global_features=true"),
        overrides=("--trainer.local_epochs", "5", "--trainer.max_rounds", "10"),
        rate_of="permuted_mnist",
    ),
    "permuted_mnist_paper_rate": Study(
        "compare_permuted_mnist.yaml",
        "The same with five local epochs and the paper's learning rate, a tenth of the best here",
        methods=("fedavg", f"{CONV}:cache_global_features=true", f"{LOCAL}:cache_global_features=true"),
        overrides=("--trainer.local_epochs", "5", "--trainer.max_rounds", "40", "--model.lr", "0.002"),
    ),
    "permuted_mnist_program": Study(
        "compare_permuted_mnist.yaml",
        "Permuted MNIST as in the authors' program: 2 clients, each with five of the digits, 6,000 images and a"
        " permutation of its own; parts of images, mirrored at random, before the permutation; five local epochs in"
        " batches of 64; the CNN of McMahan et al. in full; momentum is kept; learning rate 0.002, times 0.99 a round",
        methods=PROGRAM_METHODS,
        monitors=PROGRAM_MONITORS,
        overrides=(*PROGRAM, "--model.model_kwargs", '{"channels": [32, 64], "hidden": 512, "dropout": 0.2}'),
    ),
    "permuted_mnist_program_network": Study(
        "compare_permuted_mnist.yaml",
        "The same with the network of the authors' program: a second convolution of 3x3, overlapping pools, and"
        " Xavier-uniform first weights",
        methods=PROGRAM_METHODS,
        monitors=PROGRAM_MONITORS,
        overrides=(
            *PROGRAM,
            *("--model.model", "fedfusion_cnn"),
            *("--model.model_kwargs", '{"channels": [32, 64], "kernels": [5, 3], "hidden": [512], "dropout": 0.2}'),
        ),
    ),
    "cifar10_classes": Study(
        "compare_cifar10_classes.yaml",
        "CIFAR-10 by classes (artificial non-IID data; a and b in the paper): 5 clients of 800 images of four classes,"
        " one local epoch; the paper's CNN with 16, 16, 96 and 48 units",
        rates=(0.005, 0.01, 0.02),
        newcomers=(3, 400),
    ),
    "cifar10_iid": Study(
        "compare_cifar10_iid.yaml",
        "CIFAR-10, IID (d in the paper): 5 clients of 800 images, one local epoch; the paper's CNN with 16, 16, 96 and"
        " 48 units",
        rates=(0.005, 0.01, 0.02),
        methods=(*METHODS, "fedfusion:operator=multi:ema=0.0"),
    ),
    "camvid": Study(
        "compare_camvid.yaml",
        "CamVid at 96x64 (184 frames) with a narrow DeepLabV3+, the two maps of whose encoder that it uses are fused: 8"
        " clients (Dirichlet 0.1), 4 in a round, 2 local epochs",
        methods=("fedavg", f"{LOCAL}:levels=[2,-1]"),
        monitors=("val_miou",),
        data="--data.data_dir",
        has_control=False,  # the model fuses two feature maps
    ),
}


def folder(name: str, arguments: argparse.Namespace) -> Path:
    return Path(arguments.runs) / "fedfusion" / name


def best_rate(name: str, arguments: argparse.Namespace) -> float | None:
    """Tuned learning rate; ``None`` for the recipe's rate."""
    return tuning.best_rate(folder(STUDIES[name].rate_of or name, arguments))


def make_plan(name: str, methods: Sequence[str], arguments: argparse.Namespace, rate: float | None) -> Plan:
    study = STUDIES[name]
    overrides = [study.data, str(arguments.data), *study.overrides]
    overrides += ["--model.lr", f"{rate:g}"] if rate is not None else []
    if arguments.quick:
        size = "300" if study.data == OF_CLIENTS else "40"
        overrides += ["--trainer.max_rounds", "2", study.data.replace("data_dir", "train_size"), size]
    return Plan(
        recipe=ROOT / "recipes" / study.recipe,
        methods=[MethodChoice.parse(text) for text in methods],
        seeds=arguments.seeds,
        out=folder(name, arguments),
        monitor=study.monitors[0],
        overrides=overrides,
    )


def make_control(plan: Plan) -> Plan:
    task = f"{fusion_control.OneMoreConvolution.__module__}.{fusion_control.OneMoreConvolution.__qualname__}"
    return replace(
        plan, methods=plan.methods[:1], out=plan.out / "control", overrides=["--model", task, *plan.overrides]
    )


def named_as_control(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**run, "method": CONTROL + (KEPT if KEPT in run["method"] else "")} for run in results]


# --- rounds to milestones, as in the paper's table 2 ------------------------------------------------------------------


def milestones_of(results: Sequence[Mapping[str, Any]], last: int) -> list[float]:
    """Milestones in whole percent."""
    base = [run for run in results if run["method"] in ("fedavg", f"fedavg{KEPT}")]
    return sorted({math.floor(100 * share * tuning.score(base, last)) / 100 for share in SHARES}) if base else []


def first_round(run: Mapping[str, Any], milestone: float) -> int | None:
    values = [values.get(run["monitor"], -1.0) for values in run["rounds"]]
    return next((number for number, value in enumerate(values, start=1) if value >= milestone), None)


def milestone_table(results: Sequence[Mapping[str, Any]], milestones: Sequence[float]) -> str:
    """Rounds to milestones, mean over seeds, and reductions compared with federated averaging and the control."""
    rounds = {(run["method"], run["seed"], one): first_round(run, one) for run in results for one in milestones}
    rows, bases = [], bases_of(results)
    for method in dict.fromkeys(run["method"] for run in results):
        kept, row = KEPT if KEPT in method else "", [f"`{method}`"]
        for milestone in milestones:
            own = {seed: count for (name, seed, one), count in rounds.items() if (name, one) == (method, milestone)}
            reached = [count for count in own.values() if count is not None]
            some = f" ({len(reached)} of {len(own)})" if len(reached) < len(own) else ""
            row.append(f"{statistics.fmean(reached):.1f}{some}" if reached else "never")
            for other in bases:
                pairs = [(count, rounds.get((other + kept, seed, milestone))) for seed, count in own.items()]
                shares = [100 * (1 - count / many) for count, many in pairs if count is not None and many is not None]
                row.append(paired(shares, 0) if method not in (other + kept, bases[0] + kept) else "")
        rows.append(row)
    header = [cell for one in milestones for cell in (f"{one:.0%}", *(f"% fewer than `{other}`" for other in bases))]
    return table(["method", *header], rows)


def bases_of(results: Sequence[Mapping[str, Any]]) -> list[str]:
    names = {run["method"].replace(KEPT, "") for run in results}
    return [name for name in ("fedavg", CONTROL) if name in names]


def score_table(results: Sequence[Mapping[str, Any]], monitors: Sequence[str], last: int) -> str:
    """Final scores and costs."""
    cells = {name: summarize([{**run, "monitor": name} for run in results], last=last) for name in monitors}
    scores = {
        (run["method"], run["seed"]): statistics.fmean(values[monitors[0]] for values in run["rounds"][-last:])
        for run in results
    }
    rows, bases = [], bases_of(results)
    for key, cell in cells[monitors[0]].items():
        row = [f"`{key[0]}`", str(len(cell.score))]
        row += [spread(cells[name][key].score) for name in monitors]
        kept = KEPT if KEPT in key[0] else ""
        for place, other in enumerate(bases, start=3):
            pairs = [
                (score, scores.get((other + kept, seed)))
                for (method, seed), score in scores.items()
                if method == key[0]
            ]
            apart = [100 * (score - theirs) for score, theirs in pairs if theirs is not None]
            row.insert(place, paired(apart, 1) if key[0] not in (other + kept, bases[0] + kept) else "")
        rows.append([*row, f"{statistics.fmean(cell.megabytes):.1f}", f"{statistics.fmean(cell.cpu_seconds):.0f}"])
    header = ["method", "seeds", monitors[0], *(f"to `{other}`, points" for other in bases), *monitors[1:]]
    return table([*header, "MB", "CPU s"], rows)


def operator_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Logged values of the fusion operators by round, mean over seeds: distance from the identity."""
    logged = {(run["method"], name) for run in results for name in run["rounds"][-1] if name.startswith("fedfusion/")}
    rows = []
    for method, name in sorted(logged):
        curves = [[values[name] for values in run["rounds"]] for run in results if run["method"] == method]
        curve = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        chosen = (curve[0], curve[len(curve) // 4], curve[len(curve) // 2], curve[-1])
        rows.append([f"`{method}`", f"`{name}`", *(f"{value:.3f}" for value in chosen)])
    return (
        table(["method", "logged", "first round", "after a quarter", "after half", "last round"], rows) if rows else ""
    )


# --- the report -------------------------------------------------------------------------------------------------------


def report(
    name: str, results: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], arguments: argparse.Namespace
) -> str:
    study, last = STUDIES[name], arguments.last
    labels = [MethodChoice.parse(text).label for text in study.readings]
    main = [run for run in results if run["method"] not in labels]
    rate, rounds = best_rate(name, arguments), max(len(run["rounds"]) for run in results)
    parts = [
        f"`python benchmarks/fedfusion.py --data DATA --studies {name} --out benchmarks/results/fedfusion.md`."
        f" {study.words}; `recipes/{study.recipe}`, {rounds} rounds"
        f"{'' if rate is None else f', learning rate {rate:g}'}. {machine(arguments.threads)}.",
    ]
    scores = load_json(folder(name, arguments) / "rates.json")
    if scores:
        tried = ", ".join(f"{value:.3f} with {text}" for text, value in scores.items())
        parts.append(f"The rate was chosen with `fedavg` on validation data (`--tune`, seed {tuning.SEED}): {tried}.")
    for monitor in study.monitors[:-1] or study.monitors:
        shown = [{**run, "monitor": monitor} for run in main]
        marks = milestones_of(shown, last)
        parts += [
            f"Rounds until `{monitor}` reaches 90 %, 95 % and 99 % of what `fedavg` ends with, mean over the seeds that"
            f" do, and how many fewer in percent. {PAIRED}",
            milestone_table(shown, marks),
        ]
    parts += [
        f"Over the last {last} rounds, mean ± standard deviation over seeds; bytes and CPU seconds of a run:",
        score_table(main, study.monitors, last),
        operator_table(main),
        picture(arguments, f"fedfusion_{name}", f"`{study.monitors[0]}` by round, mean over seeds with their range."),
    ]
    if len(main) < len(results):
        base = [run for run in main if run["method"] in ("fedavg", *METHODS[2:])]
        shown = [*base, *(run for run in results if run["method"] in labels)]
        parts += [
            "Other readings of the paper and of the authors' program:",
            milestone_table(shown, milestones_of(main, last)),
            score_table(shown, study.monitors, last),
        ]
    if found and study.newcomers is not None:
        count, size = study.newcomers
        parts += [
            f"Clients that were never seen ({count} for each seed, {size // 2} test images each to train on and as many"
            " to be evaluated on) train the last global model; epochs until the accuracy is within half a point of its"
            f" best in {len(found[0]['curves'][0]) - 1} epochs, and accuracies:",
            newcomers.report(found),
            picture(arguments, f"fedfusion_{name}_newcomers", "Accuracy of clients that were never seen, by epoch."),
        ]
    return "\n\n".join(part for part in parts if part)


def run_study(name: str, arguments: argparse.Namespace) -> None:
    """Trains missing runs, and writes the section with stored results."""
    study, rate = STUDIES[name], best_rate(name, arguments)
    methods = (study.methods[0], study.methods[-1]) if arguments.quick else study.methods
    methods = [text for text in methods if not arguments.methods or text in (study.methods[0], *arguments.methods)]
    plans = [make_plan(name, methods, arguments, rate)]
    if study.readings and (arguments.readings or arguments.report):
        plans.append(make_plan(name, study.readings, arguments, rate))
    results, found = [], []
    for plan in plans:
        if not arguments.report:
            print(name, flush=True)
            run_comparison(plan)
        results += load_results(plan)
    fused = list(results)
    if study.has_control:
        control = make_control(plans[0])
        if not arguments.report:
            run_comparison(control)
        results = [*results[:1], *named_as_control(load_results(control)), *results[1:]]
    for result in fused:
        run = Run(MethodChoice.parse(result["method"]), result["seed"], result["stragglers"])
        is_there = (folder(name, arguments) / "runs" / run.name / newcomers.FILE).exists()
        is_due = study.newcomers is not None and arguments.epochs and run.method.label in METHODS
        if study.newcomers is not None and (is_there or (is_due and not arguments.report)):
            count, size = (2, 40) if arguments.quick else study.newcomers
            found.append(newcomers.measure(plans[0], run, count, size, 2 if arguments.quick else arguments.epochs))
    if not results:
        return
    if arguments.figures is not None:
        arguments.figures.mkdir(parents=True, exist_ok=True)
        main = [run for run in results if run["method"] in (*study.methods, CONTROL, CONTROL + KEPT)]
        draw(main, arguments.figures / f"fedfusion_{name}.png", last=arguments.last)
        if found:
            newcomers.draw(found, arguments.figures / f"fedfusion_{name}_newcomers.png")
    write_section(arguments.out, f"fedfusion-{name}", report(name, results, found, arguments))


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--studies", nargs="+", default=list(STUDIES), choices=list(STUDIES), help="settings")
    made.add_argument("--tune", action="store_true", help="choose the learning rates, and train nothing else")
    made.add_argument("--readings", action="store_true", help="train the other readings too")
    made.add_argument("--methods", nargs="+", default=[], metavar="METHOD", help="of those of the study; else all")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="seeds")
    made.add_argument("--epochs", type=int, default=50, help="local epochs of clients that were never seen; 0 for none")
    made.add_argument("--last", type=int, default=5, help="rounds at the end whose mean is the score")
    made.add_argument("--report", action="store_true", help="only make the tables of what is there")
    made.add_argument("--figures", type=Path, default=None, help="folder for the PNG files of the curves")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.seeds = arguments.seeds[:1]
    for name in arguments.studies:
        if not arguments.tune:
            run_study(name, arguments)
        elif STUDIES[name].rates:
            tuning.tune(
                name,
                STUDIES[name].rates,
                folder(name, arguments),
                partial(make_plan, name, METHODS[:1], arguments),
                arguments.last,
            )


if __name__ == "__main__":
    main()
