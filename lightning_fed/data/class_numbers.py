"""Check for equal class numbers in the clients' data sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_fed.messages import Client


class ClassNumbers:
    """Classes by ``class_to_idx``, the attribute of torchvision's image folders.

    An image folder numbers only existing classes. Two sites with different folders may give one number two meanings.

    Example:
        >>> class Folder(list):
        ...     class_to_idx = {"cat": 0, "dog": 1}
        >>> numbers = ClassNumbers()
        >>> numbers.check("a", Folder())
        >>> Folder.class_to_idx = {"dog": 0}
        >>> numbers.check("b", Folder())
        Traceback (most recent call last):
            ...
        ValueError: Expected one number for each class, but class 'dog' has 1 at client 'a' and 0 at client 'b': ...

    """

    def __init__(self) -> None:
        self._numbers: dict[str, tuple[int, str]] = {}
        self._names: dict[int, tuple[str, str]] = {}

    def check(self, client: Client | None, data: Any, stage: str = "training") -> None:
        """Adds a client's classes.

        Args:
            client: The client's key; ``None`` for data of all clients.
            data: The data set or loader.
            stage: Use of the data: training, validation or test.

        Raises:
            ValueError: If a class has another number at another client, or a number another class.

        """
        place = f"the {stage} data" if client is None else f"client {client!r}"
        if client is not None and stage != "training":
            place = f"the {stage} data of {place}"
        for classes in _named_classes(data):
            for name, number in classes.items():
                known, owner = self._numbers.setdefault(name, (number, place))
                other, namer = self._names.setdefault(number, (name, place))
                if known != number:
                    fault = f"class {name!r} has {known} at {owner} and {number} at {place}"
                elif other != name:
                    fault = f"{number} is {other!r} at {namer} and {name!r} at {place}"
                else:
                    continue
                raise ValueError(
                    f"Expected one number for each class, but {fault}: give every data set the same `class_to_idx`, for"
                    " example with empty folders for missing classes and `allow_empty=True`, or by a"
                    " `target_transform`, and delete an outdated attribute."
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
