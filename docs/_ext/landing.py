"""Draws docs/assets/demo.png: masks of three clients before training, after the first and after the last round.

    python docs/_ext/landing.py    # three minutes on a free core

The model, the data and the options are those of `lightning-fed demo`, but every client holds back a fifth of its
images, which the picture shows.
"""

from pathlib import Path

import lightning as L
import numpy as np
import torch
from matplotlib.figure import Figure

from lightning_fed import FederatedTrainer
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.callbacks.segmentation_grid import default_colors
from lightning_fed.data import Dirichlet, PartitionedData
from lightning_fed.datasets import Shapes
from lightning_fed.model.feature_extraction import evaluating
from lightning_fed.tasks import SegmentationTask

ROUNDS, CLIENTS = 16, 24
OUT = Path(__file__).parents[1] / "assets" / "demo.png"


class Masks(L.Callback):
    """Keeps what the global model says of some images after the first round and after the last."""

    def __init__(self, images):
        self.images, self.masks = images, {}

    def predict(self, module):
        with evaluating(module):
            return module(self.images).argmax(1).numpy()

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.masks["first" if trainer.current_epoch == 0 else "last"] = self.predict(module)


def main():
    L.seed_everything(0)
    torch.set_num_threads(1)
    source = Shapes(num_train=960, num_val=96, num_test=1, batch_size=8, eval_batch_size=32)
    data = PartitionedData(source, Dirichlet(CLIENTS, alpha=0.3), val_fraction=0.2)
    data.setup("fit")
    names, population = source.class_names, data.population()

    chosen, columns = {}, []
    for client, held_out in data.val.items():  # the first clients with another favourite class each
        labels = [int(mask[mask > 0].mode().values) for _, mask in (held_out[i] for i in range(len(held_out)))]
        favourite = int(np.bincount(labels).argmax())
        if favourite not in chosen and len(chosen) < 3:
            chosen[favourite] = client
            columns.append((client, favourite, held_out[labels.index(favourite)]))
    images = torch.stack([sample[0] for *_, sample in columns])
    truth = np.stack([sample[1].numpy() for *_, sample in columns])

    task = SegmentationTask(
        "DeepLabV3Plus",
        num_classes=source.num_classes,
        encoder_name="tu-mobilenetv3_small_100",
        model_kwargs={"decoder_channels": 64},
        optimizer="AdamW",
        lr=0.002,
    )
    kept = Masks(images)
    kept.masks["before"] = kept.predict(task)
    trainer = FederatedTrainer(
        max_rounds=ROUNDS,
        clients_per_round=5,
        local_epochs=3,
        batch_norm="recalibrate",
        seed=0,
        logger=False,
        callbacks=[kept, ClientEvaluation(ROUNDS)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(task, datamodule=data)
    print(f"{len(population.clients)} clients, val_miou {float(trainer.callback_metrics['val_miou']):.3f}")

    colors = np.array(default_colors(source.num_classes))
    shown = images * 0.22 + 0.47  # as Shapes has normalised them
    rows = {
        "image": shown.clamp(0, 1).permute(0, 2, 3, 1).numpy(),
        "truth": colors[truth],
        "before training": colors[kept.masks["before"]],
        "after round 1": colors[kept.masks["first"]],
        f"after round {ROUNDS}": colors[kept.masks["last"]],
    }
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    grid = figure.subplots(len(columns), len(rows), squeeze=False)
    for column, (name, pictures) in enumerate(rows.items()):
        for row, (client, favourite, _) in enumerate(columns):
            axes = grid[row, column]
            axes.imshow(pictures[row], interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            if row == 0:
                axes.set_title(name, fontsize=11)
            if column == 0:
                axes.set_ylabel(f"client {client}\nmostly {names[favourite]}s", fontsize=10)
    figure.savefig(OUT, dpi=100)


if __name__ == "__main__":
    main()
