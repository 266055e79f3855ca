"""Presets for very many classes equal the sum of the parts; FedAwS adds a server step to positives."""

import inspect
from functools import partial

import pytest
import torch

from lightning_fed.algorithms import FedAvgM, FedAwS, FedSS
from lightning_fed.algorithms.fedaws import spreadout_top_k
from lightning_fed.callbacks import SampledSoftmax, SpreadOut
from tests import models
from tests.algorithms.fedss.test_sampled_softmax import CLASSES, WEIGHT, clients, net, plain_sgd
from tests.recorders import Recorder, assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def test_fedss_is_its_parts(federated_trainer):
    preset, parts = models.Module(net(), plain_sgd), models.Module(net(), plain_sgd)
    federated_trainer(max_rounds=3, clients_per_round=2, method=FedSS(5, server_momentum=0.5)).fit(preset, clients())
    federated_trainer(max_rounds=3, clients_per_round=2, method=FedAvgM(1.0, 0.5), callbacks=[SampledSoftmax(5)]).fit(
        parts, clients()
    )
    assert_same(state_of(preset), state_of(parts))


@pytest.mark.parametrize("preset", [partial(FedSS, num_negatives=5), FedAwS])
def test_the_parts_arguments_are_the_presets(preset):
    """The preset passes every argument, with the same name and default."""
    said = {
        "objective": "negonly", "resample": "batch", "head": "logits", "target": "label", "classes": {"a": [1]},
        "row_weighting": "per_row", "server_lr": 0.5, "server_momentum": 0.25,
        "lazy_rows": True, "strength": 3.0, "variant": "margin", "k": 4, "margin": 0.7, "lr": 0.01, "comparison": 6,
        "normalize": False,
    }  # fmt: skip
    takes = inspect.signature(preset).parameters
    said = {name: value for name, value in said.items() if name in takes}
    assert set(said) == set(takes) - {"num_negatives"}
    for options in ({}, said):
        method = preset(**options)
        (step,) = method.steps
        assert step.lazy_rows == options.get("lazy_rows", False)
        assert method.aggregator.row_weighting == options.get("row_weighting", "global")
        expected = {"lr": options.get("server_lr", 1.0), "momentum": options.get("server_momentum")}
        assert expected["momentum"] in (None, step.optimizer_kwargs["momentum"])
        assert expected["lr"] == step.optimizer_kwargs["lr"]
        for part in method.callbacks:
            for name, parameter in inspect.signature(type(part)).parameters.items():
                if name in takes and name != "num_negatives":
                    assert getattr(part, name) == options.get(name, parameter.default), name
                    assert takes[name].default == parameter.default
    assert method.callbacks[0].head == "logits"
    assert getattr(method.callbacks[-1], "entry", "logits.weight") == "logits.weight"


def test_fedaws_spreads_the_rounds_classes(federated_trainer):
    """One step on the head trained with positives only, with the classes of the round's clients."""
    data = clients()
    plain, spread, recorder = models.Module(net(), plain_sgd), models.Module(net(), plain_sgd), Recorder()
    options = {"max_rounds": 1, "clients_per_round": 2, "seed": 0}
    federated_trainer(callbacks=[SampledSoftmax(0, "posonly"), recorder], **options).fit(plain, data)
    federated_trainer(method=FedAwS(strength=2.0, k=3), **options).fit(spread, data)
    held = torch.cat([data[visit.client].tensors[1] for visit in recorder.visits]).unique()
    assert 0 < len(held) < CLASSES
    weight = state_of(plain)[WEIGHT].requires_grad_()
    (gradient,) = torch.autograd.grad(spreadout_top_k(weight, held, 3), weight)
    expected = weight.detach() - 2.0 * 0.3 * gradient
    expected *= (weight.detach().norm(dim=1) / expected.norm(dim=1))[:, None]
    torch.testing.assert_close(state_of(spread)[WEIGHT], expected)
    assert float((2.0 * 0.3 * gradient).abs().max()) > 1e-3
    assert torch.equal(state_of(spread)["net.0.weight"], state_of(plain)["net.0.weight"])


def test_the_margin_variant(federated_trainer):
    method = FedAwS(variant="margin", margin=0.5, server_momentum=0.9)
    step = next(callback for callback in method.callbacks if isinstance(callback, SpreadOut))
    assert (step.variant, step.margin) == ("margin", 0.5)
    module = models.Module(net(), plain_sgd)
    federated_trainer(max_rounds=1, method=method).fit(module, clients())
    assert all(value.isfinite().all() for value in state_of(module).values())
