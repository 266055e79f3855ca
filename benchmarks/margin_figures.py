"""FedMargin's figures: training loss, margin, discrepancy and entropy by round; segmentations with entropy.

The first figure uses Synthetic(1,1) with different clients for every seed, half of the clients stragglers. The second
figure uses generated scenes from the study `shapes`. Recipes and methods equal `fedmargin.py`.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fedmargin
import lightning as L
import torch
from common import machine, parser, prepare, run_all, spread, table, write_section

from lightning_fed.compare import CENTRAL, MethodChoice
from lightning_fed.compare.run import Run, quiet, train
from lightning_fed.metrics.functional import feature_entropy, median_distance, softmax_entropy
from lightning_fed.modules import extract_features
from lightning_fed.report.figures import INK, save_figure

METHODS = ("fedavg", "fairavg", "fedprox:mu=0.1", "fedmargin")
MEASURES = {
    "train_loss": "training loss",
    "amm": "aggregate margin",
    "mmd": "discrepancy to central features",
    "entropy": "entropy",
}
ROUNDS_SHOWN = (1, 5, 10, 20, 30)
SCENES, SCENE_ROUNDS = 4, 20


class Watch(L.Callback):
    """Measures the global model after every round, compared with the central model's features."""

    def __init__(self, cli: Any, reference: torch.Tensor) -> None:
        self.cli, self.reference, self.bandwidth = cli, reference, median_distance(reference)
        self.values: list[dict[str, float]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.values.append(fedmargin.measure(*fedmargin.outputs_of(self.cli), self.reference, self.bandwidth))


def train_quietly(cli: Any, method: str, seed: int, stragglers: float | None) -> list[dict[str, float]]:
    with TemporaryDirectory() as folder, quiet():
        run = Run(MethodChoice.parse(method), seed, stragglers)
        rounds: list[dict[str, float]] = train(cli, run, Path(folder), Path(folder), lambda *_: None)["rounds"]
    return rounds


def curves(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures for every method by round, and for central training at the end."""
    plan = fedmargin.make_plan("steps", "", METHODS, [0.5], arguments)
    with quiet():
        central = plan.build(seed)
    train_quietly(central, CENTRAL, seed, None)
    reference, logits, labels = fedmargin.outputs_of(central)
    found = {CENTRAL: [fedmargin.measure(reference, logits, labels, reference, median_distance(reference))]}
    for method in METHODS:
        with quiet():
            cli = plan.build(seed)
        watch = Watch(cli, reference)
        cli.trainer.callbacks.append(watch)
        rounds = train_quietly(cli, method, seed, 0.5)
        found[method] = [
            {"train_loss": values["train_loss"], **measured}
            for values, measured in zip(rounds, watch.values, strict=True)
        ]
        print(f"{name} {seed} {method} {found[method][-1]}", flush=True)
    return {"seed": seed, "curves": found}


def draw_curves(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws a panel for every measure: mean and range over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4), layout="constrained")
    panels = figure.subplots(1, len(MEASURES))
    for axes, (measure, words) in zip(panels, MEASURES.items(), strict=True):
        for method in METHODS:
            columns = list(zip(*([one[measure] for one in run["curves"][method]] for run in results), strict=True))
            numbers = range(1, len(columns) + 1)
            (line,) = axes.plot(numbers, [statistics.fmean(values) for values in columns], label=method)
            lows, highs = [min(values) for values in columns], [max(values) for values in columns]
            axes.fill_between(numbers, lows, highs, alpha=0.15, color=line.get_color(), linewidth=0)
        if measure in ("amm", "entropy"):
            central = statistics.fmean(run["curves"][CENTRAL][0][measure] for run in results)
            axes.axhline(central, color=INK, linewidth=0.8, label=CENTRAL)
        axes.set(xlabel="round", ylabel=words)
        axes.grid(alpha=0.3)
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize="small", loc="outside lower center", ncols=len(labels))
    save_figure(figure, path)


def draw_maps(path: Path, arguments: argparse.Namespace) -> None:
    """Draws validation scenes: image, truth, and two methods' predictions, and entropies of classes and features."""
    from matplotlib.figure import Figure

    plan = fedmargin.make_plan("shapes", "Dirichlet 1", ("fedavg", "fedmargin"), [0.0], arguments)
    length = ["--trainer.max_rounds", "1" if arguments.quick else str(SCENE_ROUNDS)]
    plan = replace(plan, overrides=[*plan.overrides, *length])
    columns: list[tuple[str, torch.Tensor, dict[str, Any]]] = []
    for method in ("fedavg", "fedmargin"):
        with quiet():
            cli = plan.build(0)
        train_quietly(cli, method, 0, 0.0)
        images, masks = next(iter(cli.datamodule.val_dataloader()))
        with torch.no_grad():
            logits = cli.model.eval()(images[:SCENES])
        classes = {"vmin": 0, "vmax": logits.shape[1] - 1, "cmap": "tab10"}
        if not columns:
            low, high = images[:SCENES].min(), images[:SCENES].max()
            columns += [("image", ((images[:SCENES] - low) / (high - low)).permute(0, 2, 3, 1), {})]
            columns += [("truth", masks[:SCENES], classes)]
        entropy = softmax_entropy(logits)
        features = extract_features(cli.model, [(images[:SCENES], masks[:SCENES])], max_samples=None)
        side = math.isqrt(len(features) // SCENES)
        of_features = feature_entropy(features, normalize=True).view(SCENES, side, side)
        columns += [(method, logits.argmax(1), classes), ("entropy", entropy, {"vmin": 0, "vmax": 1.8})]
        columns.append(("feature entropy", of_features, {"vmin": 0, "vmax": 1}))
    figure = Figure(figsize=(1.7 * len(columns), 1.7 * SCENES), layout="constrained")
    for row, line in enumerate(figure.subplots(SCENES, len(columns))):
        for axes, (words, values, options) in zip(line, columns, strict=True):
            axes.imshow(values[row].numpy(), **options)
            axes.set_axis_off()
            axes.set_title(words if row == 0 else "", fontsize="small")
    save_figure(figure, path)


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Mean and standard deviation over seeds, by round."""
    rows = []
    for measure, words in MEASURES.items():
        for method in METHODS:
            own = [run["curves"][method] for run in results]
            shown = [spread([one[min(number, len(one)) - 1][measure] for one in own]) for number in ROUNDS_SHOWN]
            rows.append([f"{words}, `{method}`", *shown])
    return rows


def report(results: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> str:
    margin, entropy = (spread([run["curves"][CENTRAL][0][name] for run in results]) for name in ("amm", "entropy"))
    text = (
        "`python benchmarks/margin_figures.py --out benchmarks/results/fedmargin.md --figures docs/assets`."
        " Synthetic(1,1), other data with every seed, half of the clients stragglers; the global model on validation"
        " data after every round: aggregate margin (half the mean distance between the means of two classes' features),"
        " discrepancy (maximum mean discrepancy to the features of the central model of the same seed, Gaussian"
        " kernel, median bandwidth), and entropy of the class probabilities, in nats. Mean ± standard deviation over"
        f" {len(results)} seeds. Central training ends with margin {margin} and entropy {entropy}."
        f" {machine(arguments.threads)}.\n\n{table(['after round', *map(str, ROUNDS_SHOWN)], rows_of(results))}"
    )
    if arguments.figures is None or arguments.out is None:
        return text
    folder = os.path.relpath(arguments.figures, arguments.out.parent)
    return (
        f"{text}\n\n![Loss, margin, discrepancy and entropy by round]({folder}/fedmargin_rounds.png)\n\n"
        f"Scenes of the study `shapes`, after {SCENE_ROUNDS} rounds, seed 0: prediction, entropy of the class"
        " probabilities (in nats, from 0, dark, to 1.8), and entropy over the channels of the features (divided by the"
        " largest possible entropy, from 0 to 1):\n\n"
        f"![Scenes, the predictions of FedAvg and FedMargin, and two entropies]({folder}/fedmargin_entropy.png)"
    )


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False, seeds=(0, 1, 2, 3, 4))
    made.add_argument("--figures", type=Path, default=None, help="folder for the PNG files")
    arguments = made.parse_args()
    prepare(arguments)
    arguments.test, arguments.data = False, None
    results = run_all("margin_figures", ["curves"], curves, arguments)["curves"]
    if arguments.figures is not None:
        arguments.figures.mkdir(parents=True, exist_ok=True)
        draw_curves(results, arguments.figures / "fedmargin_rounds.png")
        draw_maps(arguments.figures / "fedmargin_entropy.png", arguments)
    write_section(arguments.out, "fedmargin-rounds", report(results, arguments))


if __name__ == "__main__":
    main()
