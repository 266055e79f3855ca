"""FedMA compared with federated averaging, FedProx, PFNM and ablations, by rounds and by transmitted bytes.

The script trains missing runs through `lightning_fed.compare`, and makes tables and figures from stored results.
`--tune` chooses the learning rate once, with federated averaging, by the validation score under a separate seed; all
methods use this rate. The study with different local epochs also tunes a separate rate for FedMA.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tuning
from common import PAIRED, load_json, machine, paired, parser, picture, prepare, spread, table, write_section

from lightning_fed.algorithms import FedMA, Method
from lightning_fed.compare import CENTRAL, MethodChoice, Plan, load_results, run_comparison
from lightning_fed.report.figures import save_figure
from lightning_fed.steps import UniformWeights

ROOT = Path(__file__).parents[1]
METHODS = (
    "central",
    "fedavg",
    "fedprox:mu=0.01",
    "pfnm",
    "pfnm:initial=independent",
    "fedma",
    "fedma:initial=independent",
    "fedma:mode=permute",
    "fedma:mode=none",
    "fedma:score=published",
    "fedma.PublishedFedMA",
)
PUBLISHED_LSTM = f"{METHODS[-1]}:gamma=0.001:last_layer=size"  # as in the authors' program for this network


class PublishedFedMA(Method):
    """FedMA with independent initial models, the published score, and equal client weights."""

    def __init__(self, gamma: float | None = None, last_layer: Literal["class", "size"] = "class") -> None:
        rule = FedMA(initial="independent", score="published", gamma=gamma, last_layer=last_layer)
        super().__init__(rule, steps=[UniformWeights()])


@dataclass(frozen=True)
class Study:
    """A data set.

    Args:
        recipe: Recipe in ``recipes/``.
        words: Description for the report.
        rates: Candidate learning rates; empty for the recipe's rate.
        methods: The methods.
        monitor: Compared metric.
        overrides: Recipe options.
        tuned_with: Method for the choice of the rate.
    """

    recipe: str
    words: str
    rates: Sequence[float] = ()
    methods: Sequence[str] = METHODS
    monitor: str = "val_acc"
    overrides: Sequence[str] = ()
    tuned_with: str = "fedavg"


STUDIES = {
    "mnist": Study(
        "compare_fedma_mnist.yaml",
        "MNIST (4,000 images) with a narrow LeNet (10, 20 channels, 100 units): 8 clients, Dirichlet 0.5 per class,"
        " 3 local epochs; five passes through four layers",
        (0.01, 0.02, 0.05, 0.1),
    ),
    "cifar10": Study(
        "compare_fedma_cifar10.yaml",
        "CIFAR-10 (4,800 images) with a quarter of VGG-9's channels: 16 clients, Dirichlet 0.5 per class, 1 epoch;"
        " two passes through nine layers",
        (0.005, 0.01, 0.02, 0.03),
        (*METHODS[:4], "fedma", "fedma:mode=none", METHODS[-1]),
    ),
    "shakespeare": Study(
        "compare_fedma_shakespeare.yaml",
        "Shakespeare's plays with a small LSTM (embedding 8, 64 neurons) that tells the next character at every step:"
        " 16 roles, 2 local epochs; four passes through three layers",
        (1.0, 2.0, 4.0),
        (*METHODS[:4], "fedma", "fedma:initial=independent", "fedma:mode=none", PUBLISHED_LSTM),
    ),
    "resnet": Study(
        "compare_fedma_resnet.yaml",
        "CIFAR-10 (3,200 images) with a narrow ResNet (`resnet10t`: four blocks, BatchNorm, 16 to 96 channels):"
        " 8 clients, Dirichlet 0.5 per class, 1 epoch; three passes through five stages",
        (0.02, 0.05, 0.1),
        (
            *METHODS[:4],
            *(f"fedma:stages=5{more}" for more in ("", ":mode=permute", ":mode=none")),
        ),
    ),
    "camvid": Study(
        "compare_camvid.yaml",
        "CamVid at 96x64 (184 frames) with a narrow DeepLabV3+ (mobilenet_v2): 8 clients of equal sizes, 4 in a round,"
        " Dirichlet 0.1, 2 local epochs; two passes through five stages",
        methods=(*METHODS[:4], *(f"fedma:stages=5{more}" for more in ("", ":mode=permute", ":mode=none"))),
        monitor="val_miou",
    ),
}

# About as many steps before an exchange as published: 940 instead of 980.
STUDIES["cifar10_long"] = Study(
    STUDIES["cifar10"].recipe,
    "CIFAR-10 (12,000 images) with a quarter of VGG-9's channels: 4 clients, Dirichlet 0.5 per class, 10 epochs in"
    " batches of 32 with the published rate (0.01, not tuned); a pass through nine layers",
    methods=("fedavg", METHODS[-1], "fedma:mode=none"),
    overrides=(
        *("--data.train_size", "12000", "--data.batch_size", "32", "--trainer.partition.num_clients", "4"),
        *("--trainer.local_epochs", "10", "--trainer.max_rounds", "9", "--model.lr", "0.01"),
    ),
)

# The published network, data and clients; half of the published epochs.
STUDIES["cifar10_full"] = Study(
    STUDIES["cifar10"].recipe,
    "CIFAR-10 (48,000 images) with all channels of VGG-9: 16 clients, Dirichlet 0.5 per class, 10 epochs in batches of"
    " 64 with the published rate (0.01, not tuned); a pass through nine layers",
    methods=("fedavg", METHODS[-1], "fedma:mode=none"),
    overrides=(
        *("--data.train_size", "48000", "--data.batch_size", "64", "--model.model_kwargs.width", "1"),
        *("--trainer.local_epochs", "10", "--trainer.max_rounds", "9", "--model.lr", "0.01"),
    ),
)
STUDIES["shakespeare_full"] = Study(
    STUDIES["shakespeare"].recipe,
    "Shakespeare's plays with an LSTM of the published size (embedding 8, 256 neurons) that tells the next character at"
    " every step: 66 roles, 2 local epochs, learning rate 1 (not tuned); one pass through three layers",
    methods=("fedavg", PUBLISHED_LSTM, "fedma:mode=none"),
    overrides=(
        *("--model.hidden_size", "256", "--data.max_clients", "66", "--model.lr", "1.0"),
        *("--trainer.max_rounds", "3"),
    ),
)

WHOLE_PASSES = {
    "mnist": (12, 5),
    "cifar10": (9, 2),
    "shakespeare": (6, 4),
    "cifar10_long": (90, 1),
    "resnet": (5, 3),
    "camvid": (10, 2),
}
"""A client's epochs in a FedMA pass, and the passes."""
LONG_ROUNDS = ", {} epochs a round"
for of, (epochs, passes) in WHOLE_PASSES.items():
    STUDIES[f"{of}_whole_passes"] = Study(
        STUDIES[of].recipe,
        f"The same data and network; a round has the {epochs} local epochs that a client trains in a pass of FedMA"
        f" before a layer is averaged again; as many rounds as passes ({passes})",
        (STUDIES[of].rates[0] / 4, STUDIES[of].rates[0] / 2, *STUDIES[of].rates) if STUDIES[of].rates else (),
        METHODS[1:3] if STUDIES[of].rates else METHODS[1:2],
        STUDIES[of].monitor,
        overrides=(*STUDIES[of].overrides, "--trainer.local_epochs", f"{epochs}", "--trainer.max_rounds", f"{passes}"),
    )

EPOCHS = {1: (0.01, 0.02, 0.05, 0.1), 3: (0.01, 0.02, 0.05), 10: (0.01, 0.02, 0.05), 30: (0.005, 0.01, 0.02, 0.05)}
"""Local epochs before an exchange, and candidate learning rates."""
SHARED_RATE = ", the rate of `fedavg`"
for epochs, rates in EPOCHS.items():
    STUDIES[f"mnist_{epochs}_epochs"] = Study(
        STUDIES["mnist"].recipe,
        "MNIST (4,000 images) with a narrow LeNet (10, 20 channels, 100 units): 8 clients, Dirichlet 0.5 per class; two"
        " passes through four layers",
        rates,
        ("fedavg", "pfnm:initial=independent", METHODS[-1], "fedma:mode=none"),
        overrides=("--trainer.local_epochs", f"{epochs}", "--trainer.max_rounds", "8"),
    )
    STUDIES[f"mnist_{epochs}_epochs_fedma"] = replace(
        STUDIES[f"mnist_{epochs}_epochs"],
        rates=(0.005, 0.01, 0.02) if epochs < 30 else (0.005, 0.01),
        methods=METHODS[-1:],
        tuned_with=METHODS[-1],
    )


def folder(name: str, arguments: argparse.Namespace) -> Path:
    return Path(arguments.runs) / "fedma" / name


def make_plan(name: str, arguments: argparse.Namespace, rate: float | None) -> Plan:
    study = STUDIES[name]
    overrides = ["--data.data_dir", str(arguments.data)]
    overrides += [*study.overrides, *(["--model.lr", f"{rate:g}"] if rate is not None else [])]
    overrides += ["--trainer.max_rounds", "1"] if arguments.quick else []
    return Plan(
        recipe=ROOT / "recipes" / study.recipe,
        methods=[
            MethodChoice.parse(text) for text in study.methods if not arguments.methods or text in arguments.methods
        ],
        seeds=arguments.seeds,
        stragglers=[0.0],
        out=folder(name, arguments),
        monitor=study.monitor,
        overrides=overrides,
    )


def is_long(method: str) -> bool:
    return method.endswith(LONG_ROUNDS.partition("{}")[2])


def megabytes(values: Mapping[str, float]) -> float:
    return (values.get("comm/total_up_bytes", 0.0) + values.get("comm/total_down_bytes", 0.0)) / 1e6


def with_whole_passes(name: str, runs: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> list[Any]:
    """Runs of a study, and renamed runs with a whole pass's epochs per round."""
    if name not in WHOLE_PASSES:
        return list(runs)
    longer = f"{name}_whole_passes"
    found = load_results(make_plan(longer, arguments, tuning.best_rate(folder(longer, arguments))))
    epochs, _ = WHOLE_PASSES[name]
    return [*runs, *({**run, "method": f"{run['method']}{LONG_ROUNDS.format(epochs)}"} for run in found)]


def is_in_another_table(name: str, arguments: argparse.Namespace) -> bool:
    """True if the table of the study with shorter rounds already has the runs as rows."""
    shorter = name.removesuffix("_whole_passes")
    return (
        shorter != name
        and not arguments.methods
        and bool(load_results(make_plan(shorter, arguments, tuning.best_rate(folder(shorter, arguments)))))
    )


def agreement(run: Mapping[str, Any]) -> list[float]:
    """Agreement between matched neurons after the first pass, mean over the layers."""
    shares: dict[str, float] = {}
    for values in run["rounds"]:
        shares |= {name: value for name, value in values.items() if name.endswith("/agreement")}
        if "fedma/growth" in values:
            break
    return [statistics.fmean(shares.values())] if shares else []


def tried_rates(name: str, arguments: argparse.Namespace) -> str:
    rates = load_json(folder(name, arguments) / "rates.json") or {}
    return ", ".join(f"{rate} {found:.3f}" for rate, found in rates.items())


def report(name: str, runs: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> str:
    """A row for each method: final score, and score within the smallest method's total of transmitted bytes."""
    study = STUDIES[name]
    federated = [run for run in runs if run["method"] != CENTRAL and not is_long(run["method"])]
    budget = min((megabytes(run["rounds"][-1]) for run in federated), default=0.0)
    rows = []
    for method in dict.fromkeys(run["method"] for run in runs):
        own = [run for run in runs if run["method"] == method]
        is_central = method == CENTRAL
        within = [
            [values[study.monitor] for values in run["rounds"] if megabytes(values) <= budget * 1.05] for run in own
        ]
        growth = [
            max((values["fedma/growth"] for values in run["rounds"] if "fedma/growth" in values), default=1.0)
            for run in own
        ]
        rows.append(
            [
                "`{}`{}{}".format(*method.partition(",")),
                spread([run["rounds"][-1][study.monitor] for run in own]),
                "" if is_central else spread([scores[-1] for scores in within if scores]),
                "" if is_central else f"{statistics.fmean(megabytes(run['rounds'][-1]) for run in own):.1f}",
                "" if is_central else f"{statistics.fmean(growth):.2f}",
                spread([value for run in own for value in agreement(run)], 2),
                f"{statistics.fmean(sum(v['cpu_seconds'] for v in run['rounds']) for run in own):.0f}",
                f"{len(own)}",
            ]
        )
    tried = tried_rates(name, arguments)
    rate = (
        f"Learning rates tried with `fedavg` (`--tune`, seed {tuning.SEED}): {tried}; the best is taken. "
        if tried
        else ""
    )
    more = f" {name}_whole_passes" if any(is_long(run["method"]) for run in runs) else ""
    rounds = f"All methods have {len(runs[0]['rounds'])} rounds"
    if any(is_long(run["method"]) for run in runs):
        epochs, passes = WHOLE_PASSES[name]
        rounds += (
            f", but for the rows with {epochs} epochs a round, as many as a client trains in a pass of FedMA: these"
            f" have {passes}"
        )
        rates = tried_rates(f"{name}_whole_passes", arguments)
        rounds += f", and a rate of their own ({rates})" if rates else ""
    header = ["method", f"`{study.monitor}`", f"with {budget:.1f} MB", "MB", "size", "agreement", "CPU s", "seeds"]
    return (
        f"`python benchmarks/fedma.py --data DATA --studies {name}{more} --out benchmarks/results/fedma.md`."
        f" {study.words}; `recipes/{study.recipe}`. {rate}{rounds}; the score with fewer megabytes is the last one"
        f" before 5 % more; megabytes are those of all clients, up and down; size is the largest global model over a"
        f" client's; agreement the share of the squared length of the neurons' incoming weights that their means keep,"
        f" mean over the layers of the first pass, where it is logged. {machine(arguments.threads)}.\n\n"
        f"{table(header, rows)}"
        + (f"\n\nBy round:\n\n{by_round(runs, study.monitor)}" if name.endswith("_full") else "")
    )


def by_round(runs: Sequence[Mapping[str, Any]], monitor: str) -> str:
    """Score and total megabytes after each round, mean over seeds."""
    rows = []
    for method in dict.fromkeys(run["method"] for run in runs):
        rounds = list(zip(*(run["rounds"] for run in runs if run["method"] == method), strict=True))
        scores = [statistics.fmean(values[monitor] for values in of_round) for of_round in rounds]
        sent = [statistics.fmean(map(megabytes, of_round)) for of_round in rounds]
        rows.append(
            [f"`{method}`", *(f"{score:.3f} ({size:.0f} MB)" for score, size in zip(scores, sent, strict=True))]
        )
    return table(["method", *(f"{number}" for number in range(1, len(rows[0])))], rows)


def with_bytes(run: Mapping[str, Any], budget: float, monitor: str) -> float:
    """Last score within a budget of megabytes (with 5 % tolerance), or else the first round's score."""
    scores: list[float] = [values[monitor] for values in run["rounds"] if megabytes(values) <= budget * 1.05]
    return scores[-1] if scores else float(run["rounds"][0][monitor])


def of_epochs(epochs: int, plans: Mapping[str, Plan]) -> list[Any]:
    """Runs for one local epoch count: FedMA with a separate rate, and with federated averaging's rate."""
    shared, own = (
        load_results(plans[name]) if name in plans else []
        for name in (f"mnist_{epochs}_epochs", f"mnist_{epochs}_epochs_fedma")
    )
    return [
        *(
            {**run, "method": f"{run['method']}{SHARED_RATE}"} if run["method"] in METHODS[-1:] else run
            for run in shared
        ),
        *own,
    ]


def report_epochs(found: Mapping[int, Sequence[Mapping[str, Any]]], arguments: argparse.Namespace) -> str:
    """A row for each local epoch count and method, with the difference to federated averaging."""
    names = [f"mnist_{epochs}_epochs{own}" for own in ("", "_fedma") for epochs in EPOCHS]
    rows = []
    for epochs, runs in found.items():
        budget = min(megabytes(run["rounds"][-1]) for run in runs)
        baselines = {
            run["seed"]: (run["rounds"][-1]["val_acc"], with_bytes(run, budget, "val_acc"))
            for run in runs
            if run["method"] == "fedavg"
        }
        for method in dict.fromkeys(run["method"] for run in runs):
            own = [run for run in runs if run["method"] == method]
            scores = {  # final, and within the budget
                run["seed"]: (run["rounds"][-1]["val_acc"], with_bytes(run, budget, "val_acc")) for run in own
            }
            pairs = [(scores[seed], other) for seed, other in baselines.items() if seed in scores]
            differences = ["", ""]
            if method != "fedavg":
                differences = [paired([mine[when] - other[when] for mine, other in pairs]) for when in (0, 1)]
            growth = [max(values.get("fedma/growth", 1.0) for values in run["rounds"]) for run in own]
            losses = [values["train_loss"] for run in own for values in run["rounds"]]
            losses = [loss for loss in losses if math.isfinite(loss)]
            rows.append(
                [
                    f"{epochs}",
                    "`{}`{}{}".format(*method.partition(",")),
                    spread([end for end, _ in scores.values()]),
                    differences[0],
                    spread([early for _, early in scores.values()]),
                    differences[1],
                    f"{statistics.fmean(megabytes(run['rounds'][-1]) for run in own):.1f}",
                    f"{statistics.fmean(growth):.2f}",
                    spread([value for run in own for value in agreement(run)], 2),
                    f"{max(losses):.1f}" if max(losses) < 100 else f"{max(losses):.0e}",
                    f"{len(own)}",
                ]
            )
    tried, tried_fedma = (
        "; ".join(f"{epochs} epochs: {tried_rates(f'mnist_{epochs}_epochs{own}', arguments)}" for epochs in EPOCHS)
        for own in ("", "_fedma")
    )
    header = ["local epochs", "method", "`val_acc`", "difference to `fedavg`", "with few MB", "difference to `fedavg`"]
    return (
        f"`python benchmarks/fedma.py --data DATA --studies {' '.join(names)} --out benchmarks/results/fedma.md`."
        f" {STUDIES[names[0]].words}; `recipes/{STUDIES[names[0]].recipe}`. Learning rates tried with `fedavg` for"
        f" each number of local epochs (`--tune`, seed {tuning.SEED}): {tried}; and with FedMA: {tried_fedma}. The"
        " best is taken: for FedMA its own, for all others that of `fedavg`. All have 8 rounds; the score with few"
        " megabytes is the last one before 5 % more than the thriftiest method with as many local epochs sends in all;"
        " size is the largest global model over a client's; agreement as in the tables above; `train_loss` the largest"
        " that is finite, over rounds and seeds."
        f" {PAIRED} {machine(arguments.threads)}.\n\n"
        f"{table([*header, 'MB', 'size', 'agreement', 'largest `train_loss`', 'seeds'], rows)}"
    )


def draw_epochs(found: Mapping[int, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draws the mean score by local epochs: after all rounds, and within the smallest total of megabytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    budgets = {epochs: min(megabytes(run["rounds"][-1]) for run in runs) for epochs, runs in found.items()}
    methods = dict.fromkeys(run["method"] for runs in found.values() for run in runs)
    for method in [method for method in methods if not method.endswith(SHARED_RATE)]:
        own = {epochs: [run for run in runs if run["method"] == method] for epochs, runs in found.items()}
        own = {epochs: runs for epochs, runs in own.items() if runs}
        ends = [statistics.fmean(run["rounds"][-1]["val_acc"] for run in runs) for runs in own.values()]
        early = [
            statistics.fmean(with_bytes(run, budgets[epochs], "val_acc") for run in runs)
            for epochs, runs in own.items()
        ]
        panels[0].plot(list(own), ends, marker="o", label=method)
        panels[1].plot(list(own), early, marker="o")
    panels[0].set(title="after 8 rounds", ylabel="val_acc", ylim=(0.45, 1.0))
    panels[1].set(title="with the megabytes of the thriftiest")
    for axes in panels:
        axes.set(xlabel="local epochs before an exchange", xscale="log")
        axes.set_xticks(list(found), [f"{epochs}" for epochs in found])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    save_figure(figure, path)


def draw(name: str, runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the mean score by rounds and by megabytes. FedMA only has a model at the end of each pass."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    monitor = STUDIES[name].monitor
    for number, method in enumerate(dict.fromkeys(run["method"] for run in runs)):
        rounds = list(zip(*curves([run for run in runs if run["method"] == method]), strict=True))
        ends = [place for place, (first, *_) in enumerate(rounds) if "fedma/growth" in first] or range(len(rounds))
        scores = [statistics.fmean(values[monitor] for values in rounds[place]) for place in ends]
        style = ":" if method == CENTRAL else "-" if len(ends) == len(rounds) > 1 else "o--"
        label = method.replace(METHODS[-1], "FedMA as published")
        panels[0].plot([place + 1 for place in ends], scores, style, color=f"C{number}", label=label)
        if method != CENTRAL:
            sent = [statistics.fmean(map(megabytes, rounds[place])) for place in ends]
            panels[1].plot(sent, scores, style, color=f"C{number}")
    panels[0].set(xlabel="round", ylabel=monitor)
    panels[1].set(xlabel="megabytes, all clients, up and down", xscale="log")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    for axes in panels:
        axes.grid(alpha=0.3)
    save_figure(figure, path)


def curves(runs: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, float]]]:
    shortest = min(len(run["rounds"]) for run in runs)
    return [run["rounds"][:shortest] for run in runs]


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    usual = [name for name in STUDIES if not name.endswith("_full")]
    made.add_argument("--studies", nargs="+", default=usual, choices=list(STUDIES), help="data sets; full: on a GPU")
    made.add_argument("--methods", nargs="+", default=[], metavar="METHOD", help="of those of the study; else all")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds")
    made.add_argument("--tune", action="store_true", help="choose the learning rates, and train nothing else")
    made.add_argument("--report", action="store_true", help="only make the tables of what is there")
    made.add_argument("--figures", type=Path, default=None, help="folder for the PNG files of the curves")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.seeds = [0]
    if arguments.tune:
        for name in arguments.studies:
            plan_with = partial(make_plan, name, arguments)
            tuned_with = STUDIES[name].tuned_with
            tuning.tune(name, STUDIES[name].rates, folder(name, arguments), plan_with, last=1, method=tuned_with)
        return
    plans = {name: make_plan(name, arguments, tuning.best_rate(folder(name, arguments))) for name in arguments.studies}
    for name, plan in plans.items() if not arguments.report else ():
        print(name, flush=True)
        run_comparison(plan)
    found = {epochs: of_epochs(epochs, plans) for epochs in EPOCHS}
    found = {epochs: runs for epochs, runs in found.items() if runs}
    if found:
        link = picture(arguments, "fedma_epochs", "`val_acc` by local epochs, after 8 rounds and with few megabytes.")
        write_section(arguments.out, "fedma-epochs", f"{report_epochs(found, arguments)}\n\n{link}".strip())
        if arguments.figures is not None:
            draw_epochs(found, arguments.figures / "fedma_epochs.png")
    for name in [name for name in plans if "_epochs" not in name]:
        # after all studies are loaded: a table has rows from two studies
        runs = load_results(plans[name])
        if runs and not arguments.methods:
            runs = with_whole_passes(name, runs, arguments)
        if runs and not is_in_another_table(name, arguments):
            link = picture(arguments, f"fedma_{name}", f"`{STUDIES[name].monitor}` by round and by megabytes, means.")
            write_section(arguments.out, f"fedma-{name}", f"{report(name, runs, arguments)}\n\n{link}".strip())
            if arguments.figures is not None:
                draw(name, runs, arguments.figures / f"fedma_{name}.png")


if __name__ == "__main__":
    main()
