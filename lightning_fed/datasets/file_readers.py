"""Functions that find and read the files of the built-in data sets."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def find_file(data_dir: str | Path, candidates: Sequence[str], instructions: str) -> Path:
    """Finds the first existing candidate in the folder ``data_dir``. ``data_dir`` can also be a candidate's file."""
    root = Path(data_dir)
    if root.is_file() and root.name in {Path(candidate).name for candidate in candidates}:
        return root
    for candidate in candidates:
        if (root / candidate).exists():
            return root / candidate
    paths = " or ".join(f"`{candidate}`" for candidate in candidates)
    raise FileNotFoundError(f"Expected {paths} under `data_dir` ({root.absolute()}), but found none. {instructions}")


def read_npz(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Reads arrays from an npz file, without unpickling."""
    with np.load(path, allow_pickle=False) as archive:
        missing = sorted(set(names) - set(archive.files))
        if missing:
            raise ValueError(f"Expected {path} to hold the arrays {missing}, but it has only {sorted(archive.files)}.")
        return {name: archive[name] for name in names}


def decode_images(sources: Iterable[bytes | Path], image_size: tuple[int, int] | None = None) -> Tensor:
    """Decodes images from bytes or paths to RGB, uint8, shape (N, 3, H, W).

    `image_size` is the height and width of resized images, by default the original size.
    """
    images = []
    for source in sources:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            image = opened.convert("RGB")
        if image_size is not None and image_size != (image.height, image.width):
            is_smaller = image_size[0] <= image.height and image_size[1] <= image.width
            resampling = Image.Resampling.BOX if is_smaller else Image.Resampling.BILINEAR
            image = image.resize((image_size[1], image_size[0]), resampling)
        images.append(np.asarray(image))
    if not images:
        return torch.empty((0, 3, *(image_size or (0, 0))), dtype=torch.uint8)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def resize_masks(masks: np.ndarray, image_size: tuple[int, int] | None) -> Tensor:
    """Resizes label masks, shape (N, H, W), by nearest neighbour. None keeps the original size."""
    if image_size is not None and len(masks):
        size, nearest = image_size[::-1], Image.Resampling.NEAREST
        masks = np.stack([np.asarray(Image.fromarray(mask).resize(size, nearest)) for mask in masks])
    return torch.from_numpy(masks)


def split_bytes(content: np.ndarray, offsets: np.ndarray, indices: np.ndarray) -> Iterable[bytes]:
    """Yields files from a byte array. File i is `content[offsets[i]:offsets[i + 1]]`."""
    for index in indices:
        yield content[offsets[index] : offsets[index + 1]].tobytes()
