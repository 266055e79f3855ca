"""Check that the class numbers in the clients' data sets agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_fed.messages import Client


class ClassNumbers:
    """Classes by ``class_to_idx``, the attribute of torchvision's image folders.

    An image folder numbers only existing classes. If sites have different folders, the same number may mean different
    classes.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, tuple[int, str]] = {}
        self._names: dict[int, tuple[str, str]] = {}

    def check(self, client: Client | None, data: Any, stage: str = "training") -> None:
        """Adds the classes of a client, or for `None` the classes of all clients.

        Refuses a class with two numbers, and a number with two classes.
        """
        place = f"the {stage} data" if client is None else f"client {client!r}"
        if client is not None and stage != "training":
            place = f"the {stage} data of {place}"
        for classes in _named_classes(data):
            for name, number in classes.items():
                known, owner = self._numbers.setdefault(name, (number, place))
                other, namer = self._names.setdefault(number, (name, place))
                if known != number:
                    fault = f"class {name!r} has number {known} at {owner} and {number} at {place}"
                elif other != name:
                    fault = f"number {number} means {other!r} at {namer} and {name!r} at {place}"
                else:
                    continue
                raise ValueError(
                    f"Expected one number for each class, but {fault}: use the same `class_to_idx` in every data set, "
                    "for example with empty folders for missing classes and `allow_empty=True`, or with a "
                    "`target_transform`, and delete an outdated attribute."
                )


def _named_classes(data: Any) -> Iterator[Mapping[str, int]]:
    classes = getattr(data, "class_to_idx", None)
    if isinstance(classes, Mapping):
        yield classes
    elif isinstance(data, ConcatDataset):
        for part in data.datasets:
            yield from _named_classes(part)
    elif isinstance(data, Subset | DataLoader):
        yield from _named_classes(data.dataset)
