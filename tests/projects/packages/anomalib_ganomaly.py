"""Anomaly detection with anomalib: an image folder, model and engine."""

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.models import Ganomaly
from PIL import Image


def write_images(folder):
    generator = np.random.default_rng(0)
    for kind, count in (("good", 48), ("broken", 12)):
        (folder / kind).mkdir()
        for number in range(count):
            image = np.clip(128 + 10 * generator.standard_normal((32, 32, 3)), 0, 255)
            image[::4] = 220
            if kind == "broken":
                image[8:24, 8:24] = 20
            Image.fromarray(image.astype(np.uint8)).save(folder / kind / f"{number:03}.png")


def main(callbacks, **options):
    pl.seed_everything(5)
    folder = Path(tempfile.mkdtemp())
    write_images(folder)
    datamodule = Folder(
        name="stripes", root=folder, normal_dir="good", abnormal_dir="broken", train_batch_size=8, eval_batch_size=8,
        num_workers=0,
    )  # fmt: skip
    resize = Ganomaly.configure_pre_processor((32, 32))
    model = Ganomaly(batch_size=8, n_features=8, latent_vec_size=16, pre_processor=resize)
    options |= {"default_root_dir": str(folder), "enable_checkpointing": True}  # the engine adds a checkpoint callback
    engine = Engine(max_epochs=3, callbacks=callbacks, **options)
    engine.fit(model=model, datamodule=datamodule)
    return engine.trainer
