"""Semantic segmentation with torchgeo: raster files, a geographic sampler, and torchgeo's task."""

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import rasterio
from rasterio.transform import from_origin
from torch.utils.data import DataLoader
from torchgeo.datasets import RasterDataset, stack_samples
from torchgeo.samplers import GridGeoSampler, RandomGeoSampler
from torchgeo.trainers import SemanticSegmentationTask


class Image(RasterDataset):
    filename_glob = "image_*.tif"
    is_image = True


class Mask(RasterDataset):
    filename_glob = "mask_*.tif"
    is_image = False


def write_scenes(folder):
    """Two scenes of 128 x 128 m, north and south, in files."""
    generator = np.random.default_rng(0)
    for place, name in enumerate(("north", "south")):
        rows, columns = np.mgrid[:128, :128]
        mask = ((rows // 24 + columns // 24) % 3).astype(np.uint8)
        image = 80 * np.stack([mask == label for label in range(3)]) + 20 * generator.random((3, 128, 128))
        transform = from_origin(0, 128 - 1000 * place, 1, 1)
        for kind, values in (("image", image.astype(np.uint8)), ("mask", mask[None])):
            with rasterio.open(
                folder / f"{kind}_{name}.tif", "w", driver="GTiff", height=128, width=128, count=len(values),
                dtype="uint8", crs="EPSG:32633", transform=transform,
            ) as file:  # fmt: skip
                file.write(values)


def pick(samples):
    batch = stack_samples(samples)
    return {"image": batch["image"].float() / 80, "mask": batch["mask"].long()}


def load(dataset, sampler):
    return DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=pick)


def main(callbacks, **options):
    pl.seed_everything(0)
    folder = Path(tempfile.mkdtemp())
    write_scenes(folder)
    dataset = Image(folder) & Mask(folder)
    train = load(dataset, RandomGeoSampler(dataset, 32, 64))
    val = load(dataset, GridGeoSampler(dataset, 32, 32))
    task = SemanticSegmentationTask(
        model="unet", backbone="resnet18", weights=None, in_channels=3, num_classes=3, loss="ce", lr=1e-3
    )
    trainer = pl.Trainer(max_epochs=2, callbacks=callbacks, **options)
    trainer.fit(task, train, val)
    return trainer
