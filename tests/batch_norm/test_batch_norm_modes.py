"""Treatments of BatchNorm's running statistics:

SiloBN, FixBN, data from unknown clients, and differences of clients.
"""

import itertools
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedDataModule, Federation, FixedStatistics, LocalStatistics
from lightning_fed.algorithms import FixBN, SiloBN
from lightning_fed.batch_norm.measurement import LARGE_SHIFT, own_statistics
from lightning_fed.batch_norm.pooling import InputStatistics, pool_statistics, shift_between
from lightning_fed.errors import OptionError
from lightning_fed.model.entries import batch_norm_layers
from lightning_fed.modules import UnseenStatistics
from tests import models
from tests.breadth import quick, slow
from tests.recorders import Recorder, assert_same, state_of
from tests.references_batch_norm import (
    between_share_reference,
    fixbn_reference,
    is_statistic,
    normalised_by_batch,
    silobn_reference,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SEED, COHORT = 5, 3


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def prefixed(state):
    return {f"net.{name}": value for name, value in state.items()}


def shared_of(state):
    return {name: value for name, value in state.items() if not is_statistic(name)}


def val_loader(tensors):
    return DataLoader(TensorDataset(*tensors), len(tensors[0]))


# --- Papers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [slow(SiloBN()), "silobn:unseen=pooled"])
def test_silobn_is_the_papers_loop_bit_for_bit(method, federated_trainer):
    """BatchNorm, dropout, momentum, unequal clients, three of five: compares shared and personal entries."""
    clients = models.vectors()
    history, own = silobn_reference(
        models.norm_mlp(), clients, cross_entropy, models.momentum, rounds=4, cohort_size=COHORT, seed=SEED, epochs=2
    )
    recorder, module = Recorder(), models.Module(models.norm_mlp(), models.momentum)
    trainer = federated_trainer(
        max_rounds=4, method=method, clients_per_round=COHORT, local_epochs=2, seed=SEED, callbacks=[recorder]
    )
    trainer.fit(module, models.as_datasets(clients))
    for aggregate, expected in zip(recorder.aggregates, history, strict=True):
        assert_same(prefixed(expected), aggregate)  # messages contain no statistics
    assert len(own) > COHORT
    for client, statistics in own.items():
        assert_same(prefixed({**history[-1], **statistics}), trainer.federation.client_state(client))


@pytest.mark.parametrize("after", quick([0, 2], [2]))
def test_fixbn_is_the_papers_loop_bit_for_bit(after, federated_trainer):
    clients = models.vectors()
    history = fixbn_reference(
        models.norm_mlp(), clients, cross_entropy, models.momentum, 4, after, COHORT, SEED, epochs=2
    )
    recorder, module = Recorder(), models.Module(models.norm_mlp(), models.momentum)
    trainer = federated_trainer(
        max_rounds=4, method=f"fixbn:after={after}", clients_per_round=COHORT, local_epochs=2, seed=SEED,
        callbacks=[recorder],
    )  # fmt: skip
    trainer.fit(module, models.as_datasets(clients))
    for aggregate, expected in zip(recorder.aggregates, history, strict=True):
        assert_same(prefixed(expected), aggregate)
    assert_same(prefixed(history[-1]), state_of(module))
    assert all(layer.training for layer in batch_norm_layers(module).values())
    moved = [not torch.equal(a["1.running_mean"], b["1.running_mean"]) for a, b in itertools.pairwise(history)]
    assert moved == [number < after for number in range(1, 4)]


def test_only_statistics_differ_before_they_are_fixed(federated_trainer):
    """In training BatchNorm normalises by batch, so weights do not depend on running statistics."""
    states = {}
    for name, batch_norm in {
        "average": "average", "recalibrate": "recalibrate", "local": LocalStatistics(), "fixed": FixedStatistics(3),
        "late": FixedStatistics(2),
    }.items():  # fmt: skip
        module = models.Module(models.norm_mlp(), models.momentum)
        trainer = federated_trainer(max_rounds=3, clients_per_round=COHORT, seed=SEED, batch_norm=batch_norm)
        trainer.fit(module, models.as_datasets(models.vectors()))
        states[name] = state_of(module)
    for mode in ("recalibrate", "local", "fixed"):
        assert_same(shared_of(states["average"]), shared_of(states[mode]))
    assert_same(states["average"], states["fixed"])
    assert not torch.equal(states["average"]["net.0.weight"], states["late"]["net.0.weight"])


# --- Statistics in evaluation -----------------------------------------------------------------------------------------


def fit_local(federated_trainer, unseen, val=None, rounds=2, **options):
    clients = models.vectors()
    module = models.Module(models.norm_mlp(), models.momentum)
    trainer = federated_trainer(max_rounds=rounds, batch_norm=LocalStatistics(unseen), seed=SEED, **options)
    trainer.fit(module, datamodule=FederatedDataModule(models.as_datasets(clients), val))
    return trainer, module


def net_of(module):
    net = models.norm_mlp()
    net.load_state_dict({name.removeprefix("net."): value for name, value in module.state_dict().items()})
    return net


def test_data_of_no_known_client_with_the_batchs_statistics(federated_trainer):
    val = models.vectors({"new": 20})["new"]
    trainer, module = fit_local(federated_trainer, "batch", val_loader(val))
    expected = F.cross_entropy(normalised_by_batch(net_of(module), val[0]), val[1])
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    again = trainer.validate(module, val_loader(val), verbose=False)[0]["val_loss"]
    assert again == pytest.approx(expected.item(), rel=1e-5)
    with torch.no_grad():  # the hooks are removed
        plain = F.cross_entropy(module.eval()(val[0]), val[1])
    assert abs(plain.item() - expected.item()) > 1e-3
    assert_same(
        state_of(models.Module(models.norm_mlp())), state_of(module), ["net.1.running_mean", "net.5.running_var"]
    )


def test_pooled_statistics_of_the_global_model_are_those_of_recalibration(federated_trainer):
    val = models.vectors({"new": 20})["new"]
    _, local = fit_local(federated_trainer, "pooled", val_loader(val), clients_per_round=COHORT)
    module = models.Module(models.norm_mlp(), models.momentum)
    trainer = federated_trainer(max_rounds=2, batch_norm="recalibrate", seed=SEED, clients_per_round=COHORT)
    trainer.fit(module, models.as_datasets(models.vectors()))
    for name, value in state_of(module).items():
        if "running" in name:
            assert torch.equal(value, local.state_dict()[name])


@pytest.mark.parametrize("unseen", quick(["batch", "pooled"], ["batch"]))
def test_known_clients_are_evaluated_with_their_own(unseen, federated_trainer):
    """After rounds and in `validate`; a client without training uses the statistics for unseen data."""
    data = {**models.vectors({"ann": 8, "eve": 11}), "new": models.vectors({"new": 20})["new"]}
    val = {client: val_loader(tensors) for client, tensors in data.items()}
    trainer, module = fit_local(federated_trainer, unseen, val)
    logged = dict(trainer.callback_metrics)
    for client in ("ann", "eve"):
        own = models.Module(models.norm_mlp()).eval()
        own.load_state_dict(trainer.federation.client_state(client))
        with torch.no_grad():
            expected = F.cross_entropy(own(data[client][0]), data[client][1]).item()
        assert logged[f"client/{client}/val_loss"].item() == pytest.approx(expected, rel=1e-6)
    if unseen == "batch":
        net, new = net_of(module), data["new"]
        expected = F.cross_entropy(normalised_by_batch(net, new[0]), new[1]).item()
        assert logged["client/new/val_loss"].item() == pytest.approx(expected, rel=1e-5)
    trainer.validate(module, datamodule=trainer.datamodule, verbose=False)
    for client in data:
        name = f"client/{client}/val_loss"
        assert trainer.callback_metrics[name].item() == pytest.approx(logged[name].item(), rel=1e-6)


def test_layers_that_the_user_keeps_in_evaluation_mode_keep_their_statistics(federated_trainer):
    class Frozen(models.Module):
        def on_train_start(self):
            self.net[1].eval()

    val = models.vectors({"new": 20})["new"]
    module = Frozen(models.norm_mlp(), models.momentum)
    trainer = federated_trainer(max_rounds=2, batch_norm=LocalStatistics(), seed=SEED)
    trainer.fit(module, datamodule=FederatedDataModule(models.as_datasets(models.vectors()), val_loader(val)))
    net = net_of(module)
    net.eval()
    net[5].train()
    with torch.no_grad():
        expected = F.cross_entropy(net(val[0]), val[1]).item()
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(expected, rel=1e-5)


# --- Layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_statistics_of_a_batch_are_those_of_training(precision):
    net, inputs = models.deeplab().to(precision), models.scenes({"a": 3})["a"][0].to(precision)
    expected = normalised_by_batch(models.deeplab().to(precision), inputs)
    with UnseenStatistics(net.eval()), torch.no_grad():
        outputs = net(inputs)
    # 1e-3: 60 layers with sums in another order; bfloat16 has 8 bits
    tolerance = 1e-3 if precision == torch.float32 else 0.5
    assert (outputs.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max()
    with torch.no_grad():
        assert not torch.allclose(net(inputs), outputs, atol=1e-2)


def test_compiled_models():
    """Independent of earlier compiled code."""
    net, inputs = models.norm_mlp(), models.vectors({"a": 9})["a"][0]
    compiled = torch.compile(net, backend="eager")
    compiled.eval()
    with torch.no_grad():
        plain = compiled(inputs)
        with UnseenStatistics(compiled):
            outputs = compiled(inputs)
        assert torch.equal(compiled(inputs), plain)
    assert torch.allclose(outputs, normalised_by_batch(models.norm_mlp(), inputs), atol=1e-5)
    assert not torch.allclose(outputs, plain, atol=1e-2)


def test_a_single_value_per_channel_gives_the_bias():
    layer = nn.BatchNorm2d(2).eval()
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([0.5, -1.0]))
    with UnseenStatistics(layer, layers=[""]):
        assert layer(torch.full((1, 2, 1, 1), 7.0)).flatten().tolist() == [0.5, -1.0]


def test_training_and_switched_off_layers_are_left_alone():
    net, inputs = models.norm_mlp(), torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    net[3].p = 0.0
    expected = net(inputs), net.eval()(inputs)
    net = models.norm_mlp()
    net[3].p = 0.0
    statistics = UnseenStatistics(net)
    assert torch.equal(net(inputs), expected[0])
    statistics.is_active = False
    assert torch.equal(net.eval()(inputs), expected[1])
    statistics.remove()


# --- Differences of clients -------------------------------------------------------------------------------------------


def test_share_between_clients_is_that_of_all_values_at_once():
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(size, 3, 4, 4, generator=generator) * scale + scale for size, scale in ((5, 1), (9, 3), (2, 0.5))
    ]
    parts = [torch.cat([part, torch.zeros_like(part[:, :1])], 1) for part in parts]  # a constant channel
    reports = []
    for part in parts:
        net = nn.Sequential(nn.BatchNorm2d(4))
        statistics = InputStatistics(batch_norm_layers(net))
        with statistics.watching():
            net(part)
        reports.append(statistics.as_extras())
    assert shift_between(reports, "0") == pytest.approx(between_share_reference(parts), rel=1e-5)
    assert shift_between(reports[:1], "0") is None
    assert shift_between(reports, "1") is None


def report_of(*values):
    net = nn.Sequential(nn.BatchNorm1d(1))
    statistics = InputStatistics(batch_norm_layers(net))
    with statistics.watching():
        net(torch.tensor(values, dtype=torch.float32)[:, None])
    return statistics.as_extras()


@pytest.mark.parametrize(
    ("reports", "num_malicious", "shift"),
    [
        ([(0, 2), (4, 6, 8)], 0, (2 * 9 + 3 * 4) / (5 * 8)),
        # Variances 1 and 9, without the noise of a variance from 1,000 values.
        ([(-1, 1) * 500, (-3, 3) * 500], 0, (4**2 + 4**2) / (1 + 81) - 149 / 2 / 1000),
        ([(0, 2), (0, 2)], 0, 0.0),
        ([(0, 2), (0, 2), (0, 2), (100, 300)], 1, 0.0),
    ],
)
def test_shift_by_hand(reports, num_malicious, shift):
    found = shift_between([report_of(*values) for values in reports], "0", num_malicious)
    assert found == pytest.approx(shift, rel=1e-6)


def test_pooled_and_own_statistics_by_hand():
    """Inputs 0 and 2 in one client; 4, 6 and 8 in the other client."""
    reports = [report_of(0, 2), report_of(4, 6, 8)]
    assert [float(report["batch_norm:0:count"]) for report in reports] == [2, 3]
    assert [value.item() for value in pool_statistics(reports, "0")] == pytest.approx([4, 10])
    statistics = [[value.item() for value in own_statistics(report).values()] for report in reports]
    assert statistics == [pytest.approx([1, 2]), pytest.approx([6, 4])]


@pytest.mark.parametrize("size", [10, 50, 200, 1000])
def test_equal_clients_with_rare_large_values_have_a_small_shift(size):
    """Fifty channels with 2 % non-zero values each."""
    generator = torch.Generator().manual_seed(0)
    is_large = torch.rand(6, size, 50, generator=generator) < 0.02
    inputs = torch.where(is_large, 5 * torch.randn(6, size, 50, generator=generator).abs(), 0.0)
    reports = []
    for part in inputs:
        net = nn.Sequential(nn.BatchNorm1d(50))
        statistics = InputStatistics(batch_norm_layers(net))
        with statistics.watching():
            net(part)
        reports.append(statistics.as_extras())
    chance = (6 - 1) / (6 * size)
    assert shift_between(reports, "0") < chance + LARGE_SHIFT


@pytest.mark.parametrize(("count", "num_remaining"), [(2, 2), (3, 3), (4, 2), (5, 3), (8, 4)])
def test_half_of_the_values_remain_under_any_number_of_malicious_clients(count, num_remaining):
    """Equal clients with means 0, 1, 4, 9, ..."""
    reports = [report_of(place**2 - 1, place**2 + 1) for place in range(count)]
    found = shift_between(reports, "0", (count - 1) // 2 or 1)
    first = (count - num_remaining) // 2
    means = torch.arange(first, first + num_remaining).double().square()
    between = means.var(correction=0)
    assert found == pytest.approx(float(between / (1 + between)))


@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_the_log_says_once_where_pooled_statistics_fit_nobody(offset, federated_trainer, caplog):
    clients = {
        name: (inputs + offset * place, targets)
        for place, (name, (inputs, targets)) in enumerate(models.vectors().items())
    }
    recorder = Recorder()
    trainer = federated_trainer(max_rounds=2, callbacks=[recorder], seed=SEED, batch_norm="recalibrate")
    with caplog.at_level(logging.WARNING):
        trainer.fit(models.Module(models.norm_mlp(), models.sgd), models.as_datasets(clients))
    shift = recorder.logged[-1]["fed/batch_norm_shift"]
    warned = [message for message in caplog.messages if "Pooled BatchNorm statistics may not fit" in message]
    assert len(warned) == (offset > 0)
    assert (shift > 0.5) == (offset > 0)
    assert 0 < shift < 1
    if offset:
        assert "BatchNorm layer, 'net.1', comes from differences" in warned[0]
        assert "(batch_norm=LocalStatistics())" in warned[0]


@pytest.mark.parametrize(("after", "count"), [(1, 0), (2, 1), (3, 1)])
def test_statistics_that_are_never_fixed(after, count, federated_trainer, caplog):
    trainer = federated_trainer(max_rounds=2, batch_norm=FixedStatistics(after))
    with caplog.at_level(logging.WARNING):
        trainer.fit(models.Module(models.norm_mlp(), models.sgd), models.as_datasets(models.vectors()))
    assert sum("never freezes the running statistics" in message for message in caplog.messages) == count


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_a_method_keeps_its_own_treatment():
    assert Federation(FixBN(2), batch_norm=FixedStatistics(2)).options.batch_norm == FixedStatistics(2)
    with pytest.raises(ValueError, match=r"no `batch_norm` for `FixBN`, .* but got FixedStatistics\(after=3\)"):
        Federation(FixBN(2), batch_norm=FixedStatistics(3))


def test_who_has_entries_of_its_own():
    assert all(Federation(method).has_personal_entries for method in ("silobn", "fedbn", "fedper:head=head.*"))
    assert Federation(personal=["head.*"]).has_personal_entries
    assert not Federation("fixbn:after=2").has_personal_entries


def test_a_model_without_batch_norm(federated_trainer):
    with pytest.raises(OptionError, match=r"BatchNorm layers for batch_norm=Local.*\(SiloBN\), but Module has none"):
        federated_trainer(max_rounds=1, batch_norm=LocalStatistics()).fit(
            models.Module(models.mlp()), models.as_datasets(models.vectors())
        )


def test_statistics_of_frozen_layers_stay_the_servers(federated_trainer):
    module = models.Module(models.norm_mlp(), models.sgd)
    trainer = federated_trainer(max_rounds=1, batch_norm=LocalStatistics(), frozen=["net.1.*"])
    trainer.fit(module, models.as_datasets(models.vectors()))
    policies = trainer.federation.policies
    assert {policies[f"net.1.{name}"] for name in ("running_mean", "weight")} == {"frozen"}
    assert (policies["net.5.running_mean"], policies["net.5.weight"]) == ("frozen", "shared")


def test_an_error_before_a_fit_with_fixed_statistics_is_seen(either_trainer):
    """A second error in the package must not hide the original error."""
    module = models.Module(models.norm_mlp())
    module.configure_optimizers = None
    trainer = either_trainer(max_rounds=1, batch_norm=FixedStatistics(1))
    with pytest.raises(Exception, match=r"configure_optimizers|NoneType") as error:
        trainer.fit(module, datamodule=models.PooledData(models.vectors()))
    assert "'trainer'" not in str(error.value)
