"""Omniglot: handwritten characters from 50 alphabets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.datasets.array_module import SPLITS, FileDataModule, Split
from lightning_fed.datasets.arrays import ArrayDataset
from lightning_fed.datasets.file_readers import decode_images, find_file, read_npz

# Number of characters by alphabet.
_BACKGROUND = {
    "Alphabet_of_the_Magi": 20, "Anglo-Saxon_Futhorc": 29, "Arcadian": 26, "Armenian": 41, "Asomtavruli_(Georgian)": 40,
    "Balinese": 24, "Bengali": 46, "Blackfoot_(Canadian_Aboriginal_Syllabics)": 14, "Braille": 26,
    "Burmese_(Myanmar)": 34, "Cyrillic": 33, "Early_Aramaic": 22, "Futurama": 26, "Grantha": 43, "Greek": 24,
    "Gujarati": 48, "Hebrew": 22, "Inuktitut_(Canadian_Aboriginal_Syllabics)": 16, "Japanese_(hiragana)": 52,
    "Japanese_(katakana)": 47, "Korean": 40, "Latin": 26, "Malay_(Jawi_-_Arabic)": 40, "Mkhedruli_(Georgian)": 41,
    "N_Ko": 33, "Ojibwe_(Canadian_Aboriginal_Syllabics)": 14, "Sanskrit": 42, "Syriac_(Estrangelo)": 23, "Tagalog": 17,
    "Tifinagh": 55,
}  # fmt: skip
_EVALUATION = {
    "Angelic": 20, "Atemayar_Qelisayer": 26, "Atlantean": 26, "Aurek-Besh": 26, "Avesta": 26, "Ge_ez": 26,
    "Glagolitic": 45, "Gurmukhi": 45, "Kannada": 41, "Keble": 26, "Malayalam": 47, "Manipuri": 40, "Mongolian": 30,
    "Old_Church_Slavonic_(Cyrillic)": 45, "Oriya": 46, "Sylheti": 28, "Syriac_(Serto)": 23, "Tengwar": 25,
    "Tibetan": 42, "ULOG": 26,
}  # fmt: skip
_DRAWERS = 20
_INSTRUCTIONS = (
    "Pass `download=True` to download the folders with torchvision, create the file with the arrays listed in "
    "`help(Omniglot)`, or pass the folder that contains the file or the folders as `data_dir`."
)


class Omniglot(FileDataModule):
    """Handwritten characters, 28 x 28, white on black: many classes with few images per class.

    Omniglot consists of a background set and an evaluation set. 20 people drew each character once. The background set
    has 964 characters from 30 alphabets, and each character is a class. Training, validation and test data come from
    this set, split by person, so the classes are the same. The evaluation set has 659 characters from 20 other
    alphabets. :meth:`retrieval_dataloader` returns these images, to evaluate retrieval by embeddings.

    The first of these found under `data_dir` is read:

    - `omniglot/omniglot28.npz`, or the same file directly in `data_dir`. Arrays: `images` (N, 28, 28) uint8, white on
      black; `label` (0..1622, in alphabetical order by alphabet and character, background set first); `drawer` (1..20);
      `split` (0 background, 1 evaluation).
    - `omniglot-py/`, torchvision's folders. The images are inverted and resized from 105 x 105 pixels.

    The images have a natural division into clients, by default one person's drawings of one alphabet per client. There
    are 420 training clients with 14 to 55 images.

    Source: B. Lake, R. Salakhutdinov and J. Tenenbaum, "Human-level concept learning through probabilistic program
    induction", Science 2015; https://github.com/brendenlake/omniglot (MIT licence).

    Args:
        data_dir: Folder that contains the file or the folder, or the npz file itself.
        download: Whether to download missing folders into `data_dir` with torchvision.
        val_drawers: Number of people per alphabet whose drawings are for validation.
        test_drawers: Number of people per alphabet whose drawings are for testing.
        group_by: Natural clients: a person's drawings of an alphabet (`"drawer"`), or an alphabet (`"alphabet"`).
        batch_size: Images per training batch.
        **options: `normalize`, `eval_batch_size`, `num_workers`, `train_size`, `val_size`, `test_size` and `seed`.

    Raises:
        FileNotFoundError: In `setup`, if no file or folder is found, or a character's folder is missing.
        ValueError: If a number is outside the allowed range, or an array is missing from the file.

    Example:
        >>> data = Omniglot("data", val_drawers=2, test_drawers=4)
        >>> data.num_classes, data.class_names[-1], len(data.retrieval_class_names)
        (964, 'Tifinagh/character55', 659)
    """

    _mean, _std = 0.0781, 0.2576  # background set

    def __init__(
        self,
        data_dir: str | Path,
        *,
        download: bool = False,
        val_drawers: int = 2,
        test_drawers: int = 4,
        group_by: Literal["drawer", "alphabet"] = "drawer",
        batch_size: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(data_dir, _names(_BACKGROUND), batch_size=batch_size, **options)
        check_count("val_drawers", val_drawers, 0)
        check_count("test_drawers", test_drawers, 0)
        if val_drawers + test_drawers >= _DRAWERS:
            raise ValueError(
                f"Expected `val_drawers` + `test_drawers` to leave at least one of {_DRAWERS} drawers for training, "
                f"but got {val_drawers} + {test_drawers}."
            )
        check_option("group_by", group_by, ("drawer", "alphabet"))
        self.download = download
        self.val_drawers = val_drawers
        self.test_drawers = test_drawers
        self.group_by = group_by
        self.retrieval_class_names = _names(_EVALUATION)
        self._retrieval: ArrayDataset | None = None

    def prepare_data(self) -> None:
        if not self.download:
            return
        for is_background in (True, False):
            try:
                self._find(is_background)
            except FileNotFoundError:
                from torchvision import datasets  # slow to import, and needed only here

                datasets.Omniglot(str(self.data_dir), background=is_background, download=True)

    def load_split(self, split: Split) -> ArrayDataset:
        """Reads the training, validation or test data from the background set.

        `groups` has each image's natural client: alphabet and person (`"Greek/07"`), or alphabet, see `group_by`.
        """
        first_val, first_test = _DRAWERS - self.val_drawers - self.test_drawers + 1, _DRAWERS - self.test_drawers + 1
        drawings = self._read(is_background=True)
        splits = np.digitize(drawings.drawers, [first_val, first_test])
        return self._dataset_of(drawings, self.subset(split, np.flatnonzero(splits == SPLITS[split])))

    @property
    def retrieval_dataset(self) -> ArrayDataset:
        """Images of the evaluation set, with 20 alphabets not used in training."""
        if self._retrieval is None:
            drawings = self._read(is_background=False)
            self._retrieval = self._dataset_of(drawings, np.arange(len(drawings.labels)))
        return self._retrieval

    def retrieval_dataloader(self) -> DataLoader[Any]:
        """Returns a dataloader of the evaluation set, to pass to ``trainer.test``."""
        return self._loader(self.retrieval_dataset, self.eval_batch_size)

    def _dataset_of(self, drawings: _Drawings, chosen: np.ndarray) -> ArrayDataset:
        names = (*self.class_names, *self.retrieval_class_names)
        labels, drawers = drawings.labels[chosen], drawings.drawers[chosen]
        alphabets = [names[label].partition("/")[0] for label in labels]
        if self.group_by == "drawer":
            alphabets = [f"{name}/{drawer:02d}" for name, drawer in zip(alphabets, drawers, strict=True)]
        return self.make_dataset(
            "test",  # no augmentation
            drawings.images_of(chosen),
            torch.from_numpy(labels.astype(np.int64)),
            np.array(alphabets, dtype=np.str_),
        )

    def _find(self, is_background: bool) -> Path:
        folder = f"omniglot-py/images_{'background' if is_background else 'evaluation'}"
        return find_file(self.data_dir, ["omniglot/omniglot28.npz", "omniglot28.npz", folder], _INSTRUCTIONS)

    def _read(self, is_background: bool) -> _Drawings:
        path = self._find(is_background)
        if path.is_dir():
            if is_background:
                return _read_folders(path, self.class_names, 0)
            return _read_folders(path, self.retrieval_class_names, self.num_classes)
        arrays = read_npz(path, ("images", "label", "drawer", "split"))
        drawings = np.flatnonzero(arrays["split"] == (0 if is_background else 1))
        images = arrays["images"][drawings]
        return _Drawings(
            arrays["label"][drawings],
            arrays["drawer"][drawings],
            lambda chosen: torch.from_numpy(images[chosen]).unsqueeze(1),
        )


class _Drawings(NamedTuple):
    """Class and drawer of each image. ``images_of`` reads the images at given indices, shape (n, 1, 28, 28)."""

    labels: np.ndarray
    drawers: np.ndarray
    images_of: Callable[[np.ndarray], Tensor]


def _read_folders(root: Path, names: Sequence[str], first_label: int) -> _Drawings:
    """Reads torchvision's image files, with names `<alphabet>/character<number>/<any>_<drawer>.png`."""
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names, start=first_label):
        character_paths = sorted((root / name).glob("*_*.png"))
        if not character_paths:
            raise FileNotFoundError(f"Expected images of a character in {root / name}, but found none. {_INSTRUCTIONS}")
        paths += character_paths
        labels += [label] * len(character_paths)
    drawers = np.array([int(path.stem.rpartition("_")[2]) for path in paths])

    def images_of(chosen: np.ndarray) -> Tensor:
        return 255 - decode_images((paths[index] for index in chosen), (28, 28))[:, :1]

    return _Drawings(np.array(labels), drawers, images_of)


def _names(alphabets: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(f"{name}/character{n:02d}" for name, count in alphabets.items() for n in range(1, count + 1))
