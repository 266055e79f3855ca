"""FedMargin compared with the paper's baselines, on equal rounds and with stragglers: four data sets, one recipe each.

The script trains missing runs through `lightning_fed.compare`, and makes tables from stored results. Learning rates
were tuned with FedAvg on validation data (seed 0, grid 0.02, 0.05, 0.1; up to 0.4 for CamVid); all methods use the same
rate. On FEMNIST, 0.1 was slightly better for FedAvg than the chosen 0.05, but FedMargin dropped to 0.19 in single
rounds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from appearance import Background
from common import (
    PAIRED,
    load_json,
    machine,
    paired,
    parser,
    prepare,
    save_json,
    spread,
    table,
    without_columns,
    write_section,
)

from lightning_fed.compare import CENTRAL, MethodChoice, Plan, draw, load_results, markdown, run_comparison, summarize
from lightning_fed.compare.run import CHECKPOINT, Run, quiet
from lightning_fed.metrics import AggregateMeanMargin, SegmentationScores
from lightning_fed.metrics.functional import maximum_mean_discrepancy, median_distance, softmax_entropy
from lightning_fed.modules import extract_features

ROOT = Path(__file__).parents[1]
BASELINES = ("central", "fedavg", "fairavg", "fedprox:mu=0.1", "fedatt", "feddane", "fesem", "fedper", "fedrep")
OPTIONS = (  # FedMargin's options, only with OPTION_STRAGGLERS
    "fedmargin:combine=lpm",
    "fedmargin:combine=apm",
    "fedmargin:combine=product",
    "fedmargin:attention=softmax",
    "fedmargin:class_reduction=sum",
    "fedmargin:size_weighting=true",
    "fedmargin:margin=hypothesis",
    "fedmargin:margin=relative",
    "fedmargin:proto_weighting=uniform",
    "fedmargin:server_lr=0.5",
    "fedmargin:server_lr=1.5",
)
LONGER_STEP = "fedavgm:lr=1.2:momentum=0:aggregator=fairavg"  # FairAvg with FedAtt's server step
ATTENTIVE_STEP = "fedmargin:attention=softmax:server_lr=1.2"  # FedAtt's formula, with margins instead of distances
LAYER = "fedmargin:layer=model.classifier.0"  # LeNet's convolutions, before the hidden units
PAPER_METHODS = ("central", "fedavg", "fairavg", "fedprox:mu=1", "fedmargin")  # in the data sets' published forms
OPTION_STRAGGLERS = 0.5
DRAWN = ("--data.seed", "{seed}")  # each seed draws other client data


@dataclass(frozen=True)
class Study:
    """A data set.

    Args:
        recipe: Recipe in ``recipes/``.
        words: Description for the report.
        data: The recipe's option for the data folder; empty for generated data.
        methods: The methods.
        options: FedMargin variants.
        monitors: Compared metrics, with one table each.
        stragglers: Fractions of stragglers.
        variants: Name to further recipe arguments, with one folder and one panel each.
        last: Number of final rounds in the mean score.
        against: Baselines for paired differences; the analysis uses the first baseline.
        cohort: Clients in a round.
        overrides: Recipe options.
    """

    recipe: str
    words: str
    data: str
    methods: Sequence[str]
    options: Sequence[str]
    monitors: Sequence[str]
    stragglers: Sequence[float] = (0.0, 0.5, 0.8)
    variants: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"": ()})
    last: int = 5
    against: Sequence[str] = ()
    cohort: int = 10
    overrides: Sequence[str] = ()


STUDIES = {
    "synthetic": Study(
        "synthetic.yaml",
        "Synthetic(1,1) with a small MLP (60-64-10): 30 clients of unlike sizes, 10 in a round, 5 local epochs",
        "",
        (*BASELINES, "fedmargin"),
        OPTIONS,
        ("fed/val_acc/mean", "val_acc"),
        overrides=DRAWN,
    ),
    "femnist": Study(
        "compare_femnist.yaml",
        "FEMNIST with a narrow LeNet: 105 writers, 10 in a round, 5 local epochs",
        "--data.source.data_dir",
        (*BASELINES, "fedmargin"),
        (*OPTIONS, LAYER),
        ("fed/val_acc/mean", "val_acc"),
    ),
    "fashion_mnist": Study(
        "compare_fashion_mnist.yaml",
        "Fashion-MNIST (10,000 images) with a narrow LeNet: 50 clients of two labels, 10 in a round, 5 local epochs",
        "--data.source.data_dir",
        (*BASELINES, "fedmargin"),
        (*OPTIONS, LAYER),
        ("fed/val_acc/mean", "val_acc"),
    ),
    "mnist-users": Study(
        "compare_mnist_users.yaml",
        "MNIST with an MLP (784-64-10): 1,000 users of two consecutive digits, sizes by a power law (10 to 1,870"
        " images with seed 0, 55 in the mean), 10 in a round, 20 local epochs, batches of 10",
        "--data.data_dir",
        (
            "fedavg",
            "fairavg",
            "fedmargin",
            "fedatt",
            "fedprox:mu=1",
            "fedmargin:margin=hypothesis",
            ATTENTIVE_STEP,
            LONGER_STEP,
            "central",
        ),
        (),
        ("val_acc",),
        last=50,  # single rounds differ by up to 0.4
        against=("fedavg", "fairavg"),
    ),
    "steps": Study(
        "synthetic.yaml",
        "Synthetic(1,1) with a small MLP (60-64-10), and the server's steps and margins that the first study lacks",
        "",
        (
            "central",
            "fedavg",
            "fairavg",
            LONGER_STEP,
            "fedprox:mu=0.1",
            "fedatt",
            "fedatt:step_size=1.0",
            "fedmargin",
            ATTENTIVE_STEP,
            "fedmargin:margin=gain",
            "fedmargin:margin=hypothesis",
            "fedmargin:margin=relative",
        ),
        (),
        ("val_acc", "fed/val_acc/mean"),
        overrides=DRAWN,
        against=("fedavg", "fedprox:mu=0.1", "fairavg", LONGER_STEP, "fedatt"),
    ),
    "letters": Study(
        "compare_mnist_users.yaml",
        "FEMNIST's letters a to j (1,074 training images instead of the paper's 18,345) with softmax regression: 200"
        " users of three letters, sizes by a power law, 10 in a round, 20 local epochs, batches of 10",
        "--data.data_dir",
        PAPER_METHODS,
        (),
        ("val_acc",),
        (OPTION_STRAGGLERS,),
        against=("fedavg", "fairavg"),
        overrides=(
            *("--data", "letters.Letters", "--data.invert", "true", "--data.batch_size", "10", "--data.seed", "{seed}"),
            *("--model.lr", "0.003", "--model.model_kwargs", "{hidden: []}"),
            *("--trainer.partition.num_clients", "200", "--trainer.partition.labels_per_client", "3"),
            *("--trainer.partition.sigma", "1", "--trainer.partition.min_per_label", "1"),
        ),
    ),
    "synthetic-linear": Study(
        "synthetic.yaml",
        "Synthetic(1,1) in the published form: softmax regression, 30 clients of unlike sizes, 10 in a round, 20 local"
        " epochs, batches of 10, rate 0.01",
        "",
        PAPER_METHODS,
        (),
        ("val_acc", "fed/val_acc/mean"),
        (OPTION_STRAGGLERS,),
        against=("fedavg", "fairavg", "fedprox:mu=1"),
        overrides=(
            *DRAWN,
            *("--model.lr", "0.01", "--model.model_kwargs", "{hidden: []}", "--data.batch_size", "10"),
            *("--trainer.local_epochs", "20", "--trainer.max_rounds", "200"),
        ),
    ),
    "camvid": Study(
        "compare_camvid.yaml",
        "CamVid at 96x64 (184 frames) with a narrow DeepLabV3+: 8 clients of equal sizes, 4 in a round, 2 local epochs",
        "--data.data_dir",
        ("central", "fedavg", "fedprox:mu=0.1", "fedmargin"),  # with equal client sizes FairAvg is FedAvg
        (),
        ("val_miou",),
        (0.0,),  # still 36 runs with two minutes each
        {f"Dirichlet {alpha}": ("--trainer.partition.alpha", alpha) for alpha in ("0.01", "0.1", "1", "10")},
    ),
    "shapes": Study(
        "compare_shapes.yaml",
        "Generated scenes of 48x48 pixels with a small U-Net: 10 clients of 24 scenes, 5 in a round, 2 local epochs;"
        " six classes",
        "",
        ("central", "fedavg", "fedmargin"),
        (),
        ("val_miou",),
        (0.0,),
        {"Dirichlet 1": ("--trainer.partition.alpha", "1")},
        against=("fedavg",),
        cohort=5,
    ),
}


def make_plan(
    name: str, variant: str, methods: Sequence[str], stragglers: Sequence[float], arguments: argparse.Namespace
) -> Plan:
    study = STUDIES[name]
    overrides = [study.data, str(arguments.data)] if study.data else []
    overrides += [*study.overrides, *study.variants[variant]]
    overrides += ["--trainer.max_rounds", "1"] if arguments.quick else []
    return Plan(
        recipe=ROOT / "recipes" / study.recipe,
        methods=[MethodChoice.parse(text) for text in methods],
        seeds=arguments.seeds,
        stragglers=stragglers,
        out=arguments.runs / "fedmargin" / " ".join([name, *study.variants[variant][1:]]).replace(" ", "_"),
        monitor=study.monitors[0],
        test=arguments.test,
        overrides=overrides,
    )


def make_plans(name: str, arguments: argparse.Namespace) -> dict[str, list[Plan]]:
    """Plans by variant. Centralised training ignores the partition and runs only once."""
    plans: dict[str, list[Plan]] = {}
    for variant in STUDIES[name].variants:
        plans[variant] = []
        for known, stragglers in (
            (STUDIES[name].methods, arguments.stragglers or STUDIES[name].stragglers),
            (STUDIES[name].options, [OPTION_STRAGGLERS]),
        ):
            methods = [text for text in known if not arguments.methods or text in arguments.methods]
            methods = [text for text in methods if text != CENTRAL or len(plans) == 1]
            if methods:
                plans[variant].append(make_plan(name, variant, methods, stragglers, arguments))
    return plans


def report(name: str, results: Mapping[str, Sequence[Any]], arguments: argparse.Namespace) -> str:
    study, last = STUDIES[name], arguments.last or STUDIES[name].last
    of_cohort = "".join(f" {part:g}" for part in arguments.stragglers)
    command = f"python benchmarks/fedmargin.py --data DATA --studies {name}"
    command += f" --stragglers{of_cohort}" if of_cohort else ""
    command += " --out benchmarks/results/fedmargin.md"
    drawn = " Other data with every seed." if study.overrides == DRAWN else ""
    parts = [f"`{command}`. {study.words}; `recipes/{study.recipe}`.{drawn} {machine(arguments.threads)}."]
    if study.monitors == ("val_miou",):
        parts.append(
            f"Class 0 everywhere has a mean IoU of {floor(next(iter(make_plans(name, arguments).values()))[0])}."
        )
    options = [MethodChoice.parse(text).label for text in study.options]
    main = {variant: [run for run in found if run["method"] not in options] for variant, found in results.items()}
    if len(results) > 1:
        parts += [
            f"`{study.monitors[0]}`, mean ± standard deviation over seeds and stragglers:",
            overview(main, last),
        ]
    for variant, found in results.items():
        for monitor in study.monitors if main[variant] else ():
            parts += [f"**{variant}**"] if variant else []
            parts.append(markdown([{**run, "monitor": monitor} for run in main[variant]], last=last))
            if study.against:
                parts.append(compare_pairs(main[variant], study, monitor, last))
        if any(run["method"] in options for run in found):
            parts += [
                f"Options of FedMargin, {OPTION_STRAGGLERS:.0%} stragglers; difference to the default. {PAIRED}",
                compare_options(found, options, study.monitors[0], last),
            ]
    return "\n\n".join(parts)


def floor(plan: Plan) -> str:
    """Mean IoU for a constant class 0 on the validation data, over the seeds."""
    found = []
    for seed in plan.seeds:
        with quiet():
            cli = plan.build(seed)
        cli.datamodule.setup("fit")
        scores, background = SegmentationScores(cli.model.num_classes), Background(cli.model.num_classes)
        for images, masks in cli.datamodule.val_dataloader():
            scores.update(background(images), masks)
        found.append(float(scores.compute()["miou"]))
    return spread(found)


def compare_pairs(found: Sequence[Any], study: Study, monitor: str, last: int) -> str:
    """Differences between methods and baselines, and the distance of FedMargin's attention from equal weights."""
    against = [other for other in study.against if any(run["method"] == other for run in found)]
    scores: dict[str, dict[Any, float]] = {}
    attention: dict[str, list[tuple[float, float]]] = {}
    for run in found:
        if run["method"] == CENTRAL:
            continue
        values = [values[monitor] for values in run["rounds"] if monitor in values]
        scores.setdefault(run["method"], {})[run["seed"], run["stragglers"]] = statistics.fmean(values[-last:])
        attention.setdefault(run["method"], []).extend(measure_attention(run["rounds"]))
    names = [f"`{monitor}`, difference to `{other}`" for other in against]
    has_goal = monitor == study.monitors[0] and any(run["method"] == CENTRAL for run in found)
    names += [f"rounds to 80 %, % fewer than `{other}`" for other in against if has_goal]
    rows = [
        [
            f"`{method}`",
            *differences(scores, method, against),
            *(fewer_rounds(found, method, against, last) if has_goal else ()),
            f"{len(own)}",
            *(spread([pair[which] for pair in attention[method]]) for which in (0, 1)),
        ]
        for method, own in scores.items()
    ]
    note = (
        f"{PAIRED} A seed's fractions of stragglers count as one."
        f" Attention, means over the rounds: its entropy is 1 and its largest weight {1 / study.cohort:.1f} where the"
        f" {study.cohort} clients of a round count alike."
    )
    return "\n\n".join([table(["method", *names, "runs", "entropy of attention", "largest weight"], rows), note])


def fewer_rounds(found: Sequence[Any], method: str, against: Sequence[str], last: int) -> list[str]:
    """Reduction in rounds to 80 % of the central score, in percent, by pairs with equal seeds."""
    reached: dict[str, dict[Any, int]] = {}
    for (name, part), cell in summarize(found, last=last).items():
        seeds = [run["seed"] for run in found if (run["method"], run["stragglers"]) == (name, part)]
        for seed, number in zip(seeds, cell.rounds_to_target, strict=False):  # central training has none
            if number is not None:
                reached.setdefault(name, {})[seed, part] = number
    own = reached.get(method, {})
    cells = []
    for other in against:
        theirs = {} if other == method else reached.get(other, {})
        shares = {key: 100 * (1 - number / theirs[key]) for key, number in own.items() if key in theirs}
        cells.append(f"{paired(by_seed(shares), 0)}, {len(shares)} runs" if shares else "")
    return cells


def measure_attention(rounds: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """Mean entropy and mean largest attention weight over the rounds; empty for methods without attention."""
    entropies, largest = [], []
    for before, after in itertools.pairwise([{}, *rounds]):
        # Lightning's `callback_metrics` still has values from earlier rounds: only changed values are new.
        new = {name: value for name, value in after.items() if before.get(name) != value}
        weights = [value for name, value in new.items() if name.startswith("fedmargin/attention/")]
        if weights:
            entropies.append(after["fedmargin/attention_entropy"])
            largest.append(max(weights))
    return [(statistics.fmean(entropies), statistics.fmean(largest))] if largest else []


def differences(scores: Mapping[str, Mapping[Any, float]], method: str, against: Sequence[str]) -> list[str]:
    """Paired differences to each baseline as text; empty for the method itself."""
    others = [{} if other == method else scores.get(other, {}) for other in against]
    return [
        paired(by_seed({key: score - other[key] for key, score in scores[method].items() if key in other}))
        for other in others
    ]


def by_seed(values: Mapping[Any, float]) -> list[float]:
    """Mean over the fractions of stragglers for each seed, because runs with equal seeds are correlated."""
    seeds = dict.fromkeys(seed for seed, _ in values)
    return [statistics.fmean(value for key, value in values.items() if key[0] == seed) for seed in seeds]


def compare_options(found: Sequence[Any], options: Sequence[str], monitor: str, last: int) -> str:
    """Score of each option, and the paired difference to the default."""
    scores: dict[str, dict[int, float]] = {}
    for run in found:
        if run["method"] in ("fedavg", "fedmargin", *options) and run["stragglers"] == OPTION_STRAGGLERS:
            values = [values[monitor] for values in run["rounds"] if monitor in values]
            scores.setdefault(run["method"], {})[run["seed"]] = statistics.fmean(values[-last:])
    default = scores.get("fedmargin", {})
    rows = []
    for method, own in scores.items():
        gains = [score - default[seed] for seed, score in own.items() if seed in default]
        shown = paired(gains) if method != "fedmargin" else ""
        rows.append([f"`{method}`", spread(list(own.values())), shown, f"{len(own)}"])
    return table(["method", f"`{monitor}`", "difference", "seeds"], rows)


def overview(results: Mapping[str, Sequence[Any]], last: int) -> str:
    cells = {variant: summarize(found, last=last) for variant, found in results.items()}
    methods = dict.fromkeys(method for of_variant in cells.values() for method, _ in of_variant)
    rows = []
    for method in methods:
        row = [f"`{method}`"]
        for of_variant in cells.values():
            scores = [score for (name, _), cell in of_variant.items() if name == method for score in cell.score]
            std = f" ± {statistics.stdev(scores):.3f}" if len(scores) > 1 else ""
            row.append(f"{statistics.fmean(scores):.3f}{std}" if scores else "")
        rows.append(row)
    return table(["method", *cells], rows)


MEASURES = {
    "amm": "aggregate margin",
    "normalised": "aggregate margin over length",
    "mmd": "discrepancy",
    "entropy": "entropy",
}


def analyse(names: Sequence[str], arguments: argparse.Namespace) -> str:
    """Margins, discrepancies and entropies of final models, for seeds with a finished central run."""
    parts = [
        "`python benchmarks/fedmargin.py --data DATA --studies steps mnist-users --analysis --out"
        " benchmarks/results/fedmargin.md`, from the final global models, on validation data. Aggregate margin:"
        " half the"
        " mean distance between the means of two classes' features, and the same over the mean length of these means."
        " Discrepancy: maximum mean discrepancy between the features and those of the central model of the same seed"
        " (Gaussian kernel, median bandwidth). Entropy: of the class probabilities, in nats. Spreads are standard"
        f" deviations over the seeds. {PAIRED}"
    ]
    for name in names:
        against = STUDIES[name].against[:1]
        measured: dict[str, dict[str, dict[Any, float]]] = {}
        for plans in make_plans(name, arguments).values():
            for run, values in (pair for plan in plans for pair in measure_runs(plan)):
                for measure, value in values.items():
                    measured.setdefault(measure, {}).setdefault(run.method.label, {})[run.seed, run.stragglers] = value
        if not measured:
            continue
        header = ["method"]
        for words in MEASURES.values():
            header += [words, *(f"difference to `{other}`" for other in against)]
        rows = []
        for method, own in measured["amm"].items():
            row = [f"`{method}`"]
            for measure in MEASURES:
                scores = measured[measure]
                has_pairs = method != CENTRAL and all(other in scores for other in against)
                row.append(spread(by_seed(scores[method])))
                row += differences(scores, method, against) if has_pairs else [""] * len(against)
            rows.append([*row, f"{len(own)}"])
        parts += [f"**{STUDIES[name].words}**", table([*header, "runs"], rows)]
    return "\n\n".join(parts)


def measure_runs(plan: Plan) -> list[tuple[Run, dict[str, float]]]:
    """Measures for every run with a finished central run, stored with the run's result."""
    measured = []
    for seed in plan.seeds:
        central = plan.out / "runs" / Run(MethodChoice.parse(CENTRAL), seed, None).name
        reference: tuple[torch.Tensor, float] | None = None
        runs = [Run(method, seed, part) for part in plan.stragglers or () for method in plan.methods]
        for run in dict.fromkeys(replace(run, stragglers=None) if run.method.name == CENTRAL else run for run in runs):
            folder = plan.out / "runs" / run.name
            if not (folder / "result.json").exists() or not (central / "result.json").exists():
                continue
            values = load_json(folder / "analysis.json")
            if values is None:
                if reference is None:
                    features = outputs(plan, seed, central)[0]
                    reference = features, median_distance(features)
                values = measure(*outputs(plan, seed, folder), *reference)
                save_json(folder / "analysis.json", values)
            measured.append((run, values))
    return measured


def outputs(plan: Plan, seed: int, folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, logits and labels from a run's final model on the validation data."""
    with quiet():
        cli = plan.build(seed)
    cli.model.load_state_dict(torch.load(folder / CHECKPOINT, weights_only=True)["state_dict"])
    cli.datamodule.setup("fit")
    return outputs_of(cli)


def outputs_of(cli: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batches = list(cli.datamodule.val_dataloader())
    features = extract_features(cli.model, batches, max_samples=None)
    with torch.no_grad():
        logits = torch.cat([cli.model.eval()(inputs) for inputs, _ in batches])
    return features, logits, torch.cat([labels for _, labels in batches])


def measure(
    features: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor, bandwidth: float
) -> dict[str, float]:
    """Values for :data:`MEASURES`."""
    margins = {}
    for name, normalize in (("amm", False), ("normalised", True)):
        margin = AggregateMeanMargin(logits.shape[1], features.shape[1], normalize=normalize)
        margin.update(features, labels)
        margins[name] = float(margin.compute())
    discrepancy = maximum_mean_discrepancy(features, reference, bandwidth=bandwidth)
    return margins | {"mmd": float(discrepancy), "entropy": float(softmax_entropy(logits).mean())}


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--data", type=Path, default=None, help="folder that holds the data sets; synthetic needs none")
    made.add_argument("--studies", nargs="+", default=list(STUDIES), choices=list(STUDIES), help="data sets")
    made.add_argument("--methods", nargs="+", default=[], metavar="METHOD", help="of those of the study; else all")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="seeds")
    made.add_argument("--stragglers", type=float, nargs="+", default=[], help="fractions; else those of the study")
    made.add_argument("--last", type=int, default=None, help="rounds whose mean is the score; else those of the study")
    made.add_argument("--test", action="store_true", help="evaluate finished runs on the test data (do this once)")
    made.add_argument("--report", action="store_true", help="only make the tables of what is there")
    made.add_argument("--analysis", action="store_true", help="measure the final models of these studies")
    made.add_argument("--figures", type=Path, default=None, help="folder for the PNG files of the curves")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.seeds, arguments.stragglers = [0], [0.5]
        arguments.methods = arguments.methods or ["central", "fedavg", "fedper", "fedmargin"]
    if arguments.data is None and any(STUDIES[name].data for name in arguments.studies):
        raise SystemExit("Expected --data, the folder that holds the data sets, or --studies synthetic.")
    for name in arguments.studies:
        results: dict[str, list[Any]] = {}
        for variant, plans in make_plans(name, arguments).items():
            central = [run for run in next(iter(results.values()), []) if run["method"] == CENTRAL]
            found = list(central)
            for plan in plans:
                if not arguments.report:
                    print(f"{name} {variant}".strip(), flush=True)
                    run_comparison(plan)
                found += load_results(plan)
            if len(found) == len(central):
                continue
            results[variant] = found
            if arguments.figures is not None:
                arguments.figures.mkdir(parents=True, exist_ok=True)
                options = [MethodChoice.parse(text).label for text in STUDIES[name].options]
                curves = [run for run in found if run["method"] not in options]
                draw(
                    curves,
                    arguments.figures / f"fedmargin_{plans[0].out.name}.png",
                    last=arguments.last or STUDIES[name].last,
                )
            text = without_columns(report(name, results, arguments), "wall s")  # distorted by other programs
            write_section(arguments.out, f"fedmargin-{name}", text)
    if arguments.analysis:
        names = [name for name in arguments.studies if STUDIES[name].against]
        write_section(arguments.out, "fedmargin-analysis", analyse(names, arguments))


if __name__ == "__main__":
    main()
