"""FedSS on Omniglot: 964 classes, few classes per client; compared with ablations, FedAwS and the full softmax.

In the study "sop" a client has 20 classes, like Stanford Online Products in the paper. In "landmarks" a client has 43
classes and few negatives, with the label space fractions of Landmarks-User-160k (90 and 5 to 80 out of 2,028). The
script runs one (study, method, classes held, seed) after another, stores each result as JSON, skips finished runs, and
makes tables and figures from stored results.

Learning rates were tuned on validation drawers with seed 0 (``--tune``, grid 0.01, 0.03, 0.1): 0.03 was best for
FullSoftmax, and with 60 classes for PosOnly and NegOnly; FedSS with 60 classes was equal with 0.01. Central training:
0.05 (grid 0.02, 0.05). "landmarks" uses the same rates. The strength of FedAwS's step was tuned in 200 rounds
(``--spread-out``, grid 0.003, 0.01, 0.03, 0.1, 0.3, 1: 17.7, 17.7, 17.1, 14.2, 9.9, 6.2 % on validation drawers). Test
drawers and held-out alphabets are only evaluated at the end of a run; no choice depends on the results.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import (
    PAIRED,
    QUIET,
    Curve,
    load_json,
    machine,
    paired,
    parser,
    picture,
    prepare,
    save_json,
    spread,
    table,
    version,
    write_section,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.algorithms.fedavgm import FedAvgM
from lightning_fed.algorithms.fedaws.callback import SpreadOut
from lightning_fed.callbacks import SampledSoftmax
from lightning_fed.data import LabelsPerClient
from lightning_fed.datasets.omniglot import Omniglot
from lightning_fed.metrics.retrieval import MeanAveragePrecisionAtR
from lightning_fed.modules import SampledSoftmaxHead
from lightning_fed.report.figures import save_figure

WIDTH, CLIENTS, COHORT, ROUNDS, BATCH = 64, 128, 16, 400, 32
CLASSES = 964
EXTRACTOR = 32


@dataclass(frozen=True)
class Method:
    """A row of the tables.

    Args:
        words: Description.
        objective: The client's loss; ``None`` for central training.
        spread_out: Strength of FedAwS's step on the server; 0 for none.
    """

    words: str
    objective: str | None
    spread_out: float = 0.0


METHODS = {
    "fedss": Method("FedSS", "fedss"),
    "negonly": Method("NegOnly", "negonly"),
    "posonly": Method("PosOnly", "posonly"),
    "fedaws": Method("FedAwS", "posonly", spread_out=0.01),
    "full": Method("FullSoftmax (FedAvgM)", "full"),
    "central": Method("centralised", None),
}


@dataclass(frozen=True)
class Study:
    """Classes per client, and drawn classes.

    Args:
        own: Number of classes with images at a client.
        held: Method to numbers of classes held by a client (including classes with images), one run each.
        prefix: Prefix for result file names.
    """

    own: int
    held: Mapping[str, Sequence[int]]
    prefix: str = ""


STUDIES = {
    "sop": Study(
        20,
        {
            "fedss": (25, 30, 40, 60, 100),
            "negonly": (25, 60, 100),
            "posonly": (20,),
            "fedaws": (20,),
            "full": (CLASSES,),
            "central": (CLASSES,),
        },
    ),
    "landmarks": Study(
        43,
        {
            "fedss": (45, 48, 53, 62, 81),
            "negonly": (45, 48, 53, 62, 81),
            "posonly": (43,),
            "full": (CLASSES,),
            "central": (CLASSES,),
        },
        prefix="landmarks_",
    ),
}


Found = dict[tuple[str, int], list[dict[str, Any]]]


class Embedder(L.LightningModule):
    """Four convolutions with GroupNorm, an embedding with 64 features, and cosine logits."""

    def __init__(self, num_classes: int, lr: float, momentum: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for place in range(4):
            layers += [
                nn.Conv2d(EXTRACTOR if place else 1, EXTRACTOR, 3, stride=2, padding=1, bias=False),
                nn.GroupNorm(4, EXTRACTOR),
                nn.ReLU(),
            ]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * EXTRACTOR, WIDTH))
        self.head = SampledSoftmaxHead(WIDTH, num_classes)
        self.lr, self.momentum = lr, momentum

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("val_top1", (self(images).argmax(1) == labels).float().mean(), batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class Clients(FederatedDataModule):
    """Clients with images from some classes; validation drawers for the global model."""

    def __init__(self, frames: Any, validation: Any, own: int, seed: int) -> None:
        parts = self.split(frames, own, seed)
        super().__init__({client: Subset(frames, indices) for client, indices in parts.items()}, batch_size=BATCH)
        self.own = {client: frames.targets[indices].unique().tolist() for client, indices in parts.items()}
        self.own_count, self.validation = own, validation

    def split(self, frames: Any, own: int, seed: int) -> Mapping[Any, Any]:
        return LabelsPerClient(CLIENTS, own, assignment="even").split(frames, seed)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.validation, batch_size=482)


@torch.no_grad()
def evaluate(model: Embedder, source: Any) -> dict[str, float]:
    """Top-1 accuracy on test and training images, and MAP@10 on retrieval images."""
    model.eval()
    values = {}
    for name, dataset in (("test_top1", source.test_dataset), ("train_top1", source.train_dataset)):
        hits = [
            (model.head.topk(model.body(images), 1)[1][:, 0] == labels).float()
            for images, labels in DataLoader(dataset, batch_size=482)
        ]
        values[name] = float(torch.cat(hits).mean())
    metric = MeanAveragePrecisionAtR(10)
    for images, labels in DataLoader(source.retrieval_dataset, batch_size=500):
        metric.update(model.body(images), labels)
    values["map_at_10"] = float(metric.compute())
    return values


def run(
    data: Clients, source: Any, name: str, held: int, seed: int, lr: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Trains once; returns the curve, the final scores and the transmitted bytes."""
    method, rounds = METHODS[name], 2 if arguments.quick else arguments.rounds
    L.seed_everything(seed, verbose=False)
    model = Embedder(source.num_classes, lr, 0.9 if method.objective is None else 0.0)
    every = max(1, rounds // 10)
    curve = Curve(f"{name} {held} {seed} {lr}:")
    options: dict[str, Any] = {**QUIET, "check_val_every_n_epoch": every, "callbacks": [curve]}
    if method.objective is None:  # equal number of examples and batch size
        epochs = max(1, round(rounds * COHORT / len(data.own)))
        options["check_val_every_n_epoch"] = max(1, epochs // 10)
        trainer = L.Trainer(max_epochs=epochs, **options)
    else:
        options["callbacks"].append(
            SampledSoftmax(held - data.own_count, method.objective, classes=data.own)  # type: ignore[arg-type]
        )
        if method.spread_out:
            options["callbacks"].append(SpreadOut(strength=arguments.spread_out or method.spread_out))
        trainer = FederatedTrainer(
            max_rounds=rounds, clients_per_round=COHORT, method=FedAvgM(1.0, 0.9), seed=seed, **options
        )
    trainer.fit(model, datamodule=data)
    parameters = sum(value.numel() for value in model.body.parameters())
    return {
        "method": name,
        "held": held,
        "seed": seed,
        "lr": lr,
        "rounds": curve.rounds,
        "parameters": parameters,
        "version": version(),
        "machine": machine(arguments.threads),
        **evaluate(model, source),
    }


def result_path(arguments: argparse.Namespace, study: Study, name: str, held: int, seed: int, lr: float) -> Path:
    spread_out = f"_{arguments.spread_out:g}" if arguments.spread_out and METHODS[name].spread_out else ""
    length = f"_{arguments.rounds}" if arguments.rounds != ROUNDS else ""
    return Path(arguments.runs) / "fedss" / f"{study.prefix}{name}{spread_out}_{held}_{lr:g}{length}_{seed}.json"


def train(arguments: argparse.Namespace, omniglot: Omniglot) -> None:
    # Seeds in the outer loop: interrupted studies have comparable results.
    for seed, study in itertools.product(arguments.seeds, [STUDIES[name] for name in arguments.studies]):
        for name in arguments.methods:
            for held in arguments.held or study.held.get(name, ()):
                for lr in arguments.tune or [rate_of(name, arguments)]:
                    path = result_path(arguments, study, name, held, seed, lr)
                    if not path.exists():
                        data = Clients(omniglot.train_dataset, omniglot.val_dataset, study.own, seed)
                        save_json(path, run(data, omniglot, name, held, seed, lr, arguments))


def rate_of(name: str, arguments: argparse.Namespace) -> float:
    return float(arguments.central_lr if METHODS[name].objective is None else arguments.lr)


def collect(study: Study, arguments: argparse.Namespace) -> Found:
    """Results with the chosen learning rates, by method and class count."""
    found: Found = {}
    for name, sizes in study.held.items():
        for held in sizes:
            lr = rate_of(name, arguments)
            paths = [result_path(arguments, study, name, held, seed, lr) for seed in arguments.seeds]
            results = [load_json(path) for path in paths if path.exists()]
            if results:
                found[name, held] = results
    return found


def report(study_name: str, found: Found, arguments: argparse.Namespace) -> str:
    """A row by method and class count, with paired top-1 differences to PosOnly."""
    own = STUDIES[study_name].own
    first = next(iter(found.values()))[0]
    body, rows = first["parameters"], []
    others = (("posonly", own), ("full", CLASSES))
    for (name, held), results in found.items():
        layer = WIDTH * held
        scores = [
            spread([100 * result[key] for result in results], 1) for key in ("test_top1", "map_at_10", "train_top1")
        ]
        is_central = METHODS[name].objective is None
        rows.append(
            [
                METHODS[name].words,
                f"{held}",
                "" if is_central else f"{layer:,}",
                "" if is_central else f"{100 * (body + layer) / (body + WIDTH * CLASSES):.1f} %",
                *scores,
                *(differences(results, found.get(other, [])) for other in others),
                f"{len(results)}",
            ]
        )
    header = ["", "classes held", "of the layer", "of the model", "top-1", "MAP@10", "training top-1"]
    header += ["top-1, difference to PosOnly", "to FullSoftmax", "seeds"]
    length = f" --rounds {arguments.rounds}" if arguments.rounds != ROUNDS else ""
    words = (
        f"`python benchmarks/fedss.py --data DATA --studies {study_name}{length} --out benchmarks/results/fedss.md"
        f" --figures docs/assets`. Omniglot's {CLASSES} background classes: {CLIENTS} clients with {own} classes each"
        f" and {14 * CLASSES // CLIENTS} images on average (14 drawers), {COHORT} in a round, {arguments.rounds} rounds"
        f" of one epoch, batches of {BATCH},"
        f" server momentum 0.9, client learning rate {arguments.lr:g} (centralised: {arguments.central_lr:g} with"
        f" momentum 0.9, as many examples), four convolutions of {EXTRACTOR} channels with GroupNorm ({body:,}"
        f" parameters), embedding of {WIDTH}, scale 20. Parameters that travel per client and direction: of the layer,"
        " and of the whole model as a share of the full softmax's. Top-1 over all 964 classes on 4 other drawers"
        " (3,856 images), MAP@10 among the 13,180 images of 659 characters that nobody trains on; %, mean ± standard"
        f" deviation over seeds. {PAIRED} {machine(arguments.threads)}."
    )
    return f"{words}\n\n{table(header, rows)}"


def differences(results: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> str:
    """Top-1 differences on test drawers to another method; empty for the method itself."""
    scores = {other["seed"]: other["test_top1"] for other in others}
    if results is others:
        return ""
    return paired([100 * (run["test_top1"] - scores[run["seed"]]) for run in results if run["seed"] in scores], 1)


def draw(found: Found, path: Path) -> None:
    """Draws scores by transmitted bytes, and top-1 on validation drawers by round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    for number, name in enumerate(METHODS):
        sizes = [held for method, held in found if method == name]
        for axes, key in zip(panels, ("test_top1", "map_at_10"), strict=False):
            scores = [[100 * result[key] for result in found[name, held]] for held in sizes]
            means = [statistics.fmean(values) for values in scores]
            errors = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in scores]
            color = f"C{number}"
            if name == "central" and means:
                axes.axhline(means[0], color=color, linestyle=":", label=METHODS[name].words)
            elif means:
                sent = [WIDTH * held for held in sizes]
                axes.errorbar(sent, means, errors, color=color, marker="o", capsize=3, label=METHODS[name].words)
        if sizes and name != "central":
            curves = [result["rounds"] for result in found[name, sizes[-1]]]
            every = max(1, len(curves[0]) // 10)  # rounds between validations; the log repeats the last value
            points = [
                (place, [curve[place - 1]["val_top1"] for curve in curves])
                for place in range(every, len(curves[0]) + 1, every)
            ]
            panels[2].plot(
                [place for place, _ in points],
                [100 * statistics.fmean(values) for _, values in points],
                marker=".",
                color=f"C{number}",
                label=f"{METHODS[name].words}, {sizes[-1]} held",
            )
    for axes, title in zip(panels, ("top-1 on other drawers, %", "MAP@10 of unseen characters, %"), strict=False):
        axes.set(xlabel="parameters of the layer that travel per client", ylabel=title, xscale="log")
        ticks = sorted({WIDTH * held for name, held in found if name != "central"})
        ticks = [ticks[0], *(tick for tick in ticks[1:] if tick > 1.9 * ticks[0])]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xticks([], minor=True)
    panels[2].set(xlabel="round", ylabel="top-1 on validation drawers, %")
    for axes in panels:
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    panels[2].legend(fontsize="small")
    save_figure(figure, path)


def tuned(arguments: argparse.Namespace) -> str:
    """Table with the last validation score of all runs, by learning rate."""
    rows = []
    for path in sorted((Path(arguments.runs) / "fedss").glob("*.json")):
        result = load_json(path)
        scores = [values["val_top1"] for values in result["rounds"] if "val_top1" in values]
        rows.append([path.stem, f"{result['lr']:g}", f"{100 * scores[-1]:.1f}"])
    return table(["run", "learning rate", "val_top1"], rows)


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--figures", type=Path, default=None, help="folder for the PNG files of the pictures")
    made.add_argument("--studies", nargs="+", default=list(STUDIES), choices=list(STUDIES), help="classes of a client")
    made.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), help="methods")
    made.add_argument("--held", type=int, nargs="+", default=[], help="classes held, instead of the method's")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds")
    made.add_argument("--lr", type=float, default=0.03, help="learning rate of the clients")
    made.add_argument("--central-lr", type=float, default=0.05, help="learning rate of centralised training")
    made.add_argument("--spread-out", type=float, default=0.0, help="strength of FedAwS's step; 0 for the script's")
    made.add_argument("--rounds", type=int, default=ROUNDS, help="rounds")
    made.add_argument("--tune", type=float, nargs="+", default=[], help="learning rates to try, and show")
    made.add_argument("--report", action="store_true", help="only make the table of what is there")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.seeds, arguments.studies, arguments.methods, arguments.held = [0], ["sop"], ["fedss"], [25]
    omniglot = Omniglot(arguments.data)
    omniglot.setup("fit")
    omniglot.setup("test")
    if arguments.tune:
        train(arguments, omniglot)
        print(tuned(arguments))
        return
    if not arguments.report:
        train(arguments, omniglot)
    for name in arguments.studies:
        found = collect(STUDIES[name], arguments)
        if found:
            length = f"-{arguments.rounds}" if arguments.rounds != ROUNDS else ""
            section = f"fedss-{name}{length}"
            link = picture(arguments, section.replace("-", "_"), "Top-1 and MAP@10 by what travels, and the curves.")
            write_section(arguments.out, section, f"{report(name, found, arguments)}\n\n{link}".strip())
            if arguments.figures is not None:
                draw(found, arguments.figures / f"{section.replace('-', '_')}.png")


if __name__ == "__main__":
    main()
