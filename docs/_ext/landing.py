"""Draws docs/assets/demo.png: the global model's score by round, and masks for three clients' images.

    python docs/_ext/landing.py    # ten minutes on a free core

Model, data and options follow `lightning-fed demo`, with a fifth of every client's images held out. The picture shows
one held-out image per client: the image with the median number of correct pixels. The dashed line is the score after
central training on the clients' pooled data, with about the same number of training steps.
"""

from pathlib import Path

import lightning as L
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_fed import FederatedTrainer
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.callbacks.picture_grid import default_colors
from lightning_fed.data import Dirichlet, PartitionedData
from lightning_fed.datasets import Shapes
from lightning_fed.features.extraction import evaluating
from lightning_fed.report.figures import INK, save_figure
from lightning_fed.tasks import SegmentationTask

ROUNDS, CLIENTS, COHORT, EPOCHS = 48, 24, 5, 3
SHOWN = (1, 12, ROUNDS)
OUT = Path(__file__).parents[1] / "assets" / "demo.png"


class Masks(L.Callback):
    """Records the global model's scores, and masks of some images after selected rounds."""

    def __init__(self, images):
        self.images, self.masks, self.scores = images, {}, []

    def predict(self, module):
        with evaluating(module):
            return module(self.images).argmax(1).numpy()

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.scores.append(float(trainer.callback_metrics["val_miou"]))
            if trainer.current_epoch + 1 in SHOWN:
                self.masks[trainer.current_epoch + 1] = self.predict(module)


def new_task(source):
    return SegmentationTask(
        "DeepLabV3Plus",
        num_classes=source.num_classes,
        encoder_name="tu-mobilenetv3_small_100",
        model_kwargs={"decoder_channels": 64},
        optimizer="AdamW",
        lr=0.002,
    )


def main():
    L.seed_everything(0)
    torch.set_num_threads(1)
    source = Shapes(num_train=960, num_val=96, num_test=1, batch_size=8, eval_batch_size=32)
    data = PartitionedData(source, Dirichlet(CLIENTS, alpha=0.3), val_fraction=0.2)
    data.setup("fit")
    names, population = source.class_names, data.population()

    columns = {}  # first client for each most frequent class
    for client, held_out in data.val.items():
        samples = [held_out[index] for index in range(len(held_out))]
        favourite = int(np.bincount([int(mask[mask > 0].mode().values) for _, mask in samples]).argmax())
        if len(columns) < 3:
            columns.setdefault(favourite, (client, samples))
    images, truth = (
        torch.stack([sample[part] for _, samples in columns.values() for sample in samples]) for part in (0, 1)
    )

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    central = L.Trainer(max_epochs=ROUNDS * COHORT * EPOCHS // CLIENTS, check_val_every_n_epoch=5, **quiet)
    central.fit(new_task(source), datamodule=data)
    reference = float(central.callback_metrics["val_miou"])
    print(f"central training: val_miou {reference:.3f}", flush=True)

    kept = Masks(images)
    trainer = FederatedTrainer(
        max_rounds=ROUNDS,
        clients_per_round=COHORT,
        local_epochs=EPOCHS,
        batch_norm="recalibrate",
        seed=0,
        callbacks=[kept, ClientEvaluation(ROUNDS)],
        **quiet,
    )
    L.seed_everything(0)
    trainer.fit(new_task(source), datamodule=data)
    print([round(score, 3) for score in kept.scores])
    print(f"{len(population.clients)} clients, val_miou {float(trainer.callback_metrics['val_miou']):.3f}")

    right, begin = (kept.masks[ROUNDS] == truth.numpy()).mean((1, 2)), 0
    typical = []  # image with the median number of correct pixels, by client
    for _, samples in columns.values():
        order = begin + right[begin : begin + len(samples)].argsort()
        typical.append(order[len(order) // 2])
        begin += len(samples)
    images, truth = images[typical], truth.numpy()[typical]
    kept.masks = {number: masks[typical] for number, masks in kept.masks.items()}

    colors = np.array(default_colors(source.num_classes))
    shown = images * 0.22 + 0.47  # undoes the normalisation in Shapes
    rows = {
        "image": shown.clamp(0, 1).permute(0, 2, 3, 1).numpy(),
        "truth": colors[truth],
        **{f"round {number}": colors[kept.masks[number]] for number in SHOWN},
    }
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    left, grids = figure.subfigures(1, 2, width_ratios=(3.2, 8.8))
    curve = left.subplots()
    curve.plot(range(1, ROUNDS + 1), kept.scores, color="tab:purple", linewidth=2)
    curve.set(xlabel="round", xlim=(1, ROUNDS), ylim=(0, 1))
    curve.axhline(reference, color=INK, linestyle="--")
    curve.text(ROUNDS, reference + 0.02, "central training", ha="right", fontsize=10)
    curve.set_title("mIoU of the global model", fontsize=11)
    curve.spines[["top", "right"]].set_visible(False)
    grid = grids.subplots(len(columns), len(rows), squeeze=False)
    for column, (name, pictures) in enumerate(rows.items()):
        for row, (client, _) in enumerate(columns.values()):
            axes = grid[row, column]
            axes.imshow(pictures[row], interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            if row == 0:
                axes.set_title(name, fontsize=11)
            if column == 0:
                shown_names = [names[label] for label in np.unique(truth[row]) if label]
                axes.set_ylabel(f"client {client}\n{', '.join(shown_names)}", fontsize=10)
    patches = [Patch(facecolor=color / 255, label=name) for name, color in zip(names, colors, strict=True)]
    grids.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=10)
    save_figure(figure, OUT)


if __name__ == "__main__":
    main()
