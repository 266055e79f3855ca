"""Evaluation on new clients, starting from the global model: the functions of `benchmarks/newcomers.py`."""

import copy
import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.modules import fuse
from tests import models
from tests.algorithms.fedfusion.test_fusion import Net, disturb
from tests.breadth import quick
from tests.recorders import assert_same, state_of
from tests.references_fusion import FusedReference

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def newcomers():
    spec = importlib.util.spec_from_file_location("newcomers", BENCHMARKS / "newcomers.py")
    program = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        spec.loader.exec_module(program)
    return program


def loaders(sizes):
    """One batch per client: the order does not matter."""
    found = {}
    for name, (images, labels) in models.images(sizes).items():
        dataset = TensorDataset(images, labels)
        found[name] = (DataLoader(dataset, len(labels)), DataLoader(dataset, len(labels)))
    return found


@pytest.mark.parametrize(
    ("kind", "referring"),
    quick(
        itertools.product(["conv", "multi", None], [True, False]),
        [("conv", True), ("multi", False), (None, False)],
    ),
)
def test_every_client_trains_the_global_model_by_itself(newcomers, kind, referring):
    net = Net()
    net.features[3].p = 0.0  # without dropout, training is deterministic
    plain, module = copy.deepcopy(net), models.Module(net, models.momentum)
    fusion = None if kind is None else fuse(module, kind)
    parameters = {} if fusion is None else {n: v.clone() for n, v in fusion.operators["0"].state_dict().items()}
    reference = FusedReference(kind or "none", plain.features, plain.classifier, parameters)
    if fusion is not None and referring:  # the reference for evaluating the global model is restored
        disturb(fusion.frozen.network)
        fusion.refer(fusion.frozen.state())
    before, start = state_of(module), state_of(reference)
    frozen = None if fusion is None else fusion.frozen.state()
    clients = loaders({"ann": 12, "bob": 9})
    curves = newcomers.train_newcomers(module, clients, max_epochs=3, monitor="val_loss", accelerator="cpu")
    assert list(curves) == ["ann", "bob"]
    assert_same(before, state_of(module))
    if fusion is not None:
        assert fusion.is_referring == referring
        assert not referring or assert_same(frozen, fusion.frozen.state()) is None
    for name, (images, labels) in models.images({"ann": 12, "bob": 9}).items():
        reference.load_state_dict(start)
        reference.refer()
        optimizer = models.momentum(reference.parameters())
        losses = []
        for _ in range(4):
            reference.eval()
            with torch.no_grad():
                losses.append(F.cross_entropy(reference(images), labels).item())
            reference.train()
            reference.frozen[0].eval()
            optimizer.zero_grad()
            F.cross_entropy(reference(images), labels).backward()
            optimizer.step()
        assert curves[name] == pytest.approx(losses, rel=1e-4)
        assert losses[3] < losses[0]


@pytest.mark.parametrize(
    ("values", "options", "epoch"),
    [
        ([0.5, 0.9, 0.904, 0.907, 0.8], {}, 2),
        ([0.5, 0.9, 0.904, 0.907, 0.8], {"tolerance": 0.0}, 3),
        ([0.9, 0.2], {}, 0),
        ([3.0, 1.0, 0.4, 0.5], {"mode": "min", "tolerance": 0.1}, 2),
    ],
)
def test_epochs_to_converge(newcomers, values, options, epoch):
    assert newcomers.epochs_to_converge(values, **options) == epoch


def test_what_cannot_be_asked(newcomers):
    module = models.Module(Net())
    with pytest.raises(ValueError, match="Expected at least one value"):
        newcomers.epochs_to_converge([])
    with pytest.raises(ValueError, match="Expected `max_epochs` to be at least 1"):
        newcomers.train_newcomers(module, loaders({"ann": 4}), max_epochs=0)
    before = state_of(module)
    with pytest.raises(ValueError, match=r"'val_f1' is not one of \['val_acc', 'val_loss'\]"):
        newcomers.train_newcomers(module, loaders({"ann": 4}), max_epochs=1, monitor="val_f1", accelerator="cpu")
    assert_same(before, state_of(module))
