"""Finding inputs and labels in any batch."""

from collections import OrderedDict

import pytest
import torch

from lightning_fed.features.batches import as_classes, find_inputs, find_target

X, Y, Z = torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([5, 6])


@pytest.mark.parametrize(
    ("batch", "inputs", "target"),
    [
        ((X, Y), None, None),
        ([X, Y, Z], None, None),
        ([Z, X, Y], 1, 2),
        ([Z, Y, X], -1, None),
        ({"x": X, "y": Y}, None, None),
        (OrderedDict(age=Z, inputs=X, labels=Y), None, None),
        ({"label": Y, "image": X, "mask": Z}, None, None),
        ({"a": X, "b": Y, "x": Z, "y": Z}, "a", "b"),
        ({"a": {"b": X}, "c": [Y]}, lambda batch: batch["a"]["b"], lambda batch: batch["c"][0]),
    ],
)
def test_where_they_are(batch, inputs, target):
    assert find_inputs(batch, inputs) is X
    assert find_target(batch, target) is Y


def test_other_usual_keys():
    assert find_inputs(X) is X


def test_nothing_there():
    for batch in ((X,), X, {"image": X}, {"target": "cat"}, [X, ["cat"]]):
        with pytest.raises(ValueError, match=r"a batch with labels, but got \w+: select the labels with `target`"):
            find_target(batch)
    for batch in ((), {"picture": X}, ["text", Y], 3):
        with pytest.raises(ValueError, match=r"a batch with inputs, but got \w+: select the inputs with `inputs`"):
            find_inputs(batch)


@pytest.mark.parametrize(
    ("batch", "key", "has"),
    [
        ((X, Y), "z", "positions 0 to 1"),
        ([X, Y], 2, "positions 0 to 1"),
        ({"a": X}, 1, r"keys \['a'\]"),
        (3, 0, "type int"),
    ],
)
def test_places_that_are_not_there(batch, key, has):
    found = f"but got {key!r} for a batch with {has}"
    with pytest.raises(ValueError, match=f"Expected `target` to be an index or key in the batch, {found}"):
        find_target(batch, key)
    with pytest.raises(ValueError, match="Expected `inputs` to be an index or key in the batch"):
        find_inputs(batch, key)


@pytest.mark.parametrize(
    ("labels", "dims", "shape"),
    [
        (torch.ones(4), 2, (4,)),
        (torch.ones(4, 1), 2, (4,)),
        (torch.ones(4, 1, 5, 5, dtype=torch.uint8), 4, (4, 5, 5)),
        (torch.ones(4, 1, 5), 4, (4, 1, 5)),  # maps one pixel high
        (torch.ones(4, 3), 3, (4, 3)),
    ],
)
def test_classes(labels, dims, shape):
    classes = as_classes(labels, dims)
    assert classes.shape == shape
    assert not classes.is_floating_point()
    assert (classes == 1).all()


def test_fractions_are_no_classes():
    with pytest.raises(ValueError, match="integer class labels, but got fractions: select other labels with `target`"):
        as_classes(torch.tensor([0.5]), 2)
