"""Next-character prediction on Shakespeare's plays, with speaking roles as clients."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_fed.argument_checks import check_count, check_inside, check_option
from lightning_fed.data.federated import ClientData, FederatedDataModule
from lightning_fed.data.population import Population
from lightning_fed.datasets.arrays import ArrayDataset
from lightning_fed.datasets.file_readers import find_file
from lightning_fed.datasets.text import LEAF_VOCABULARY, decode_text, encode_text, make_roles, read_roles, text_windows
from lightning_fed.messages import Client

Vocabulary = Literal["leaf", "text"]

_FILES = ["shakespeare/shakespeare_roles.json.gz", "shakespeare_roles.json.gz", "shakespeare/tinyshakespeare.txt",
          "tinyshakespeare.txt"]  # fmt: skip
_INSTRUCTIONS = (
    "Create the file described in `help(Shakespeare)` from any edition of the plays, pass the folder that contains "
    "the file as `data_dir`, or omit `data_dir` for generated text."
)
_GENERATED = 12  # roles


class Shakespeare(FederatedDataModule):
    """Shakespeare's plays, for predicting the next character in a text. Each role is a client.

    The first of these files found under `data_dir` is read:

    - `shakespeare/shakespeare_roles.json.gz`, gzipped JSON: `roles`, a list of names such as `hamlet/HAMLET`, and
      `speeches`, a list of `[index of the role, text]` in the order of the plays.
    - `shakespeare/tinyshakespeare.txt`: blocks separated by empty lines, each with `ROLE:` as first line.

    Both files may also be directly in `data_dir`. Without `data_dir`, random text is generated for 12 roles.

    A sample is a window from the role's text. The first samples of a role are for training and the last for validation,
    as in the LEAF benchmark. Samples between both parts are dropped, so validation windows overlap no training windows.

    FedMA's setting is ``Shakespeare(data_dir, min_samples=10_000, max_clients=66)``, with LEAF's edition. Source: S.
    Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv:1812.01097; H. Wang et al., "Federated Learning
    with Matched Averaging", ICLR 2020.

    Args:
        data_dir: Folder that contains the file, or the file itself. None means generated text.
        min_samples: Minimum number of samples per client, counted with `stride` 1. Other roles are skipped.
        max_clients: Maximum number of clients. The first roles in the file are used.
        seq_length: Characters per window.
        stride: Number of characters between window starts.
        every_step: Whether to predict the next character at every position in a window, or only at the end.
        vocabulary: `"leaf"` for LEAF's 80 characters, or `"text"` for all characters in the file.
        val_fraction: Fraction of a role's samples for validation, in (0, 1).
        batch_size: Windows per training batch.
        eval_batch_size: Windows per validation batch. None means `batch_size`.
        num_workers: Worker processes per dataloader.
        seed: Seed for generated text, not for training.

    Raises:
        FileNotFoundError: In `setup`, if no file is found.
        ValueError: If a number is outside the allowed range. In `setup`, if the file has another format, or no role has
            enough samples.

    Example:
        >>> data = Shakespeare(max_clients=3, stride=4)
        >>> data.setup()
        >>> window, following = data.clients["generated/ROLE 1"][0]
        >>> data.num_classes, window.shape, data.decode(window)[:22], data.decode(following[None])
        (80, torch.Size([80]), 'Am it more have sword ', 'r')
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        *,
        min_samples: int = 1000,
        max_clients: int | None = None,
        seq_length: int = 80,
        stride: int = 1,
        every_step: bool = False,
        vocabulary: Vocabulary = "leaf",
        val_fraction: float = 0.2,
        batch_size: int = 50,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        check_option("vocabulary", vocabulary, Vocabulary)
        for name, value in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size), ("stride", stride),
                            ("max_clients", max_clients), ("seq_length", seq_length)):  # fmt: skip
            if value is not None:
                check_count(name, value)
        check_count("seed", seed, 0)
        check_inside("val_fraction", val_fraction)
        if min_samples * val_fraction < seq_length:
            raise ValueError(
                f"Expected `min_samples` to be at least {seq_length} / {val_fraction}, so that validation windows do "
                f"not overlap training windows, but got {min_samples}."
            )
        super().__init__({}, val={}, batch_size=batch_size, num_workers=num_workers)
        self.data_dir = None if data_dir is None else Path(data_dir)
        self.min_samples = min_samples
        self.max_clients = max_clients
        self.seq_length = seq_length
        self.stride = stride
        self.every_step = every_step
        self.val_fraction = val_fraction
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.seed = seed
        self._vocabulary = LEAF_VOCABULARY if vocabulary == "leaf" else ""

    def setup(self, stage: str | None = None) -> None:
        if self.clients:
            return
        if self.data_dir is None:
            roles = make_roles(_GENERATED, self.seed)
        else:
            roles = read_roles(find_file(self.data_dir, _FILES, _INSTRUCTIONS))
        if not self._vocabulary:
            self._vocabulary = "".join(sorted(set[str]().union(*roles.values())))
        large = [role for role, text in roles.items() if len(text) - self.seq_length >= self.min_samples]
        if not large:
            most = max(len(text) for text in roles.values()) - self.seq_length
            raise ValueError(
                f"Expected a role with {self.min_samples} samples (`min_samples`), but the largest role has {most}."
            )
        train: dict[Client, ClientData] = {}
        val = {}
        for role in large[: self.max_clients]:
            train[role], val[role] = self._split(encode_text(roles[role], self._vocabulary))
        self.clients, self.val = train, val

    @property
    def vocabulary(self) -> str:
        """String with all characters, in the order of the integer codes."""
        if not self._vocabulary:
            self.setup()
        return self._vocabulary

    @property
    def num_classes(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str) -> Tensor:
        """Converts a text to integer codes, shape ``(length,)``. Unknown characters become spaces."""
        return encode_text(text, self.vocabulary)

    def decode(self, codes: Tensor) -> str:
        return decode_text(codes, self.vocabulary)

    def population(self) -> Population:
        self.setup()
        return super().population()

    def train_dataloader(self) -> Iterable[Any]:
        self.setup()
        return super().train_dataloader()

    def evaluation_loader(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        return DataLoader(dataset, self.eval_batch_size, num_workers=self.loader_options["num_workers"])

    def _split(self, codes: Tensor) -> tuple[ArrayDataset, ArrayDataset]:
        count = len(codes) - self.seq_length
        train = int((1 - self.val_fraction) * count)
        parts = [(0, train), (train + self.seq_length - 1, count)]
        first, last = (text_windows(codes, self.seq_length, *part, self.stride, self.every_step) for part in parts)
        return first, last
