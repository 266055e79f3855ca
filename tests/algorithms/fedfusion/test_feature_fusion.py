"""FedFusion in a federation."""

import contextlib
import copy
import inspect
import itertools
import warnings
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import timm
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_fed import Availability, FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import FedBN, FedFusion
from lightning_fed.batch_norm.measurement import measure_round
from lightning_fed.callbacks import FeatureFusion, Federation, SampledSoftmax
from lightning_fed.compare import MethodChoice
from lightning_fed.data import IID
from lightning_fed.datasets import CamVid
from lightning_fed.modules import FusedExtractor, find_fusion, unwrap
from lightning_fed.tasks import ClassificationTask, SegmentationTask
from tests import models
from tests.algorithms.fedfusion.test_fusion import Net
from tests.breadth import quick, slow
from tests.recorders import MemoryLogger, Recorder, assert_same, state_of
from tests.references_fusion import FusedReference, fedfusion_reference

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

OPERATORS = ["conv", "multi", "single"]
FEW = {"ann": 13, "bob": 8, "cid": 21}
PAIR = {"ann": 8, "bob": 6}
WEIGHT = "feature_fusion.operators.0.weight"
DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"


class References(FederatedCallback):
    """Records the frozen extractor at the end of visits, and the fused network's outputs during evaluation."""

    def __init__(self):
        self.after, self.outputs = [], []

    def on_client_end(self, trainer, module, client, update):
        self.after.append(find_fusion(module).frozen.state())

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        if not trainer.sanity_checking:
            self.outputs.append(module(batch[0]).clone())


def make(operator="conv", **options):
    return FeatureFusion(operator=operator, **options)


def fit(federated_trainer, callback, module=None, clients=None, val=None, rounds=2, callbacks=(), **options):
    module = models.Module(Net(), models.momentum) if module is None else module
    clients = models.images(FEW) if clients is None else clients
    trainer = federated_trainer(
        max_rounds=rounds, callbacks=[*callbacks, *([] if callback is None else [callback])],
        **{"batch_norm": "average", "seed": 3, **options},
    )  # fmt: skip
    trainer.fit(module, models.as_datasets(clients), val)
    return module


# --- Method -----------------------------------------------------------------------------------------------------------


REFERENCES = quick(
    itertools.product(OPERATORS, ["previous", "current"]),
    [("conv", "previous"), ("multi", "current")],
)


@pytest.mark.parametrize(("operator", "eval_reference"), REFERENCES)
def test_a_fit_against_a_plain_loop(operator, eval_reference, federated_trainer):
    """Unequal clients, three of five per round, BatchNorm, dropout and momentum, in double precision.

    Compares global models, frozen extractors and evaluation outputs.
    """
    sizes = {"ann": 33, "bob": 16, "cid": 40, "dan": 7, "eve": 21}
    clients = {name: (images.double(), labels) for name, (images, labels) in models.images(sizes).items()}
    probe = torch.randn(7, 1, 8, 8).double()
    recorder, references = Recorder(), References()
    module = models.Module(Net().double(), models.momentum)
    callback = make(operator, eval_reference=eval_reference)
    val = DataLoader(TensorDataset(probe, torch.zeros(7, dtype=torch.int64)), 7)
    options = {"clients_per_round": 3, "local_epochs": 2, "rounds": 3}
    fit(federated_trainer, callback, module, clients, val, callbacks=[recorder, references], **options)
    net, prefix = Net().double(), "feature_fusion.operators.0."
    start = {name[len(prefix) :]: v for name, v in recorder.visits[0].broadcast.items() if name.startswith(prefix)}
    reference = FusedReference(operator, net.features, net.classifier, start)
    history = fedfusion_reference(
        reference, clients, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]), models.momentum,
        rounds=3, cohort_size=3, seed=3, epochs=2, probe=probe,
    )  # fmt: skip
    for round, (state, frozen, previous, current) in enumerate(history):
        aggregate = recorder.validated[round]
        for name, value in state.items():
            ours = name.replace("operator.", prefix) if name.startswith("operator.") else f"net.{name}"
            torch.testing.assert_close(aggregate[ours], value, rtol=1e-9, atol=1e-11)
        for ours, reference_value in zip(references.after[3 * round : 3 * round + 3], frozen, strict=True):
            torch.testing.assert_close(ours, reference_value, rtol=1e-9, atol=1e-11)
        expected = previous if eval_reference == "previous" else current
        torch.testing.assert_close(references.outputs[round], expected, rtol=1e-9, atol=1e-11)
    assert operator == "conv" or aggregate[WEIGHT].abs().max() > 0


def test_no_operator_is_federated_averaging(federated_trainer):
    """BatchNorm recalibration, dropout and Adam: weights, validation and logs are equal bit for bit."""
    results = []
    for callbacks in ([], [make("none")]):
        module, logger = models.Module(Net(), models.adam), MemoryLogger()
        trainer = federated_trainer(
            max_rounds=2, callbacks=callbacks, logger=logger, clients_per_round=2, local_epochs=2
        )
        trainer.fit(module, datamodule=data())
        lines = [{name: value for name, value in line.items() if "second" not in name} for _, line in logger.lines]
        results.append((state_of(module), lines))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_what_travels_grows_by_the_operator_alone(federated_trainer):
    """The "none" operator and a personal operator add no bytes."""
    sent, logged = {}, {}
    cases = {"plain": 0, "conv": 2 * 4 * 4 + 4, "multi": 4, "single": 1, "none": 0, "at home": 0}
    for case in cases:
        recorder, options = Recorder(), {"personal": ["feature_fusion.*"]} if case == "at home" else {}
        callback = None if case == "plain" else make("conv" if case == "at home" else case)
        fit(federated_trainer, callback, callbacks=[recorder], batch_norm="recalibrate", rounds=1, **options)
        sent[case], (logged[case],) = recorder.visits, recorder.logged
    for case, numbers in cases.items():
        for fused, plain in zip(sent[case], sent["plain"], strict=True):
            for message in ("broadcast", "update"):
                extra = getattr(fused, message).keys() - getattr(plain, message).keys()
                assert sum(getattr(fused, message)[name].numel() for name in extra) == numbers
                assert all(name.startswith("feature_fusion.") for name in extra)
            assert fused.extras == plain.extras
        # Three clients; recalibration sends the model down a second time.
        assert logged[case]["comm/up_bytes"] - logged["plain"]["comm/up_bytes"] == 3 * 4 * numbers
        assert logged[case]["comm/down_bytes"] - logged["plain"]["comm/down_bytes"] == 2 * 3 * 4 * numbers


class Looks(FederatedCallback):
    def __init__(self):
        self.seen = 0

    def on_client_start(self, trainer, module, client, broadcast):
        self.sent = {name: value.clone() for name, value in broadcast.state.items()}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        frozen = find_fusion(module).frozen
        for name, value in frozen.state().items():
            assert torch.equal(value, self.sent[f"net.features.{name}"])
        frozen_parameters = set(map(id, frozen.network.parameters()))
        assert not frozen_parameters & set(map(id, module.parameters()))
        assert not frozen_parameters & {
            id(p) for o in trainer.optimizers for group in o.param_groups for p in group["params"]
        }
        assert not any(p.requires_grad or p.grad is not None for p in frozen.network.parameters())
        assert not any(layer.training for layer in frozen.network.modules())
        assert module.net.training
        self.seen += 1


def test_the_frozen_extractor_is_what_was_sent(federated_trainer):
    looks = Looks()
    module = fit(federated_trainer, make("conv"), callbacks=[looks], local_epochs=2, batch_norm="recalibrate")
    assert looks.seen == 2 * 2 * 3
    assert not torch.equal(looks.sent["net.features.0.weight"], module.net.features[0].weight)


@pytest.mark.parametrize(
    ("operator", "ema"), [("multi", 0.9), slow(("single", 0.5)), slow(("multi", 0.0)), ("conv", 0.5)]
)
def test_weights_are_smoothed_before_evaluation_and_download_and_logged(operator, ema, federated_trainer):
    """The expected values come from the clients' updates. Convolutions are not smoothed."""
    recorder, logger, smoothed = Recorder(), MemoryLogger(), []
    options = {"rounds": 3, "local_epochs": 2, "logger": logger}
    module = fit(federated_trainer, make(operator, ema=ema), callbacks=[recorder], **options)
    before = recorder.visits[0].broadcast[WEIGHT]
    assert operator == "conv" or not before.any()
    for round in range(3):
        visits = recorder.round(round)
        assert all(torch.equal(visit.broadcast[WEIGHT], before) for visit in visits)
        total = sum(visit.num_samples for visit in visits)
        mean = sum(visit.num_samples / total * visit.update[WEIGHT] for visit in visits)
        before = recorder.aggregates[round][WEIGHT]
        last = smoothed[-1] if smoothed else 0.0
        smoothed.append(mean if operator == "conv" else (1 - ema) * mean + ema * last)
        torch.testing.assert_close(before, smoothed[-1])
    assert torch.equal(module.state_dict()[WEIGHT], before)
    logged = {
        name.removeprefix("fedfusion/0/"): [float(value) for _, value in logger.curve(name)]
        for _, line in logger.lines for name in line if name.startswith("fedfusion/")
    }  # fmt: skip
    if operator == "conv":
        shares = [weight[:, : len(weight)].norm() ** 2 / weight.norm() ** 2 for weight in smoothed]
        assert logged == {"global_share": pytest.approx([float(share) for share in shares])}
        assert 0.3 < float(shares[-1]) < 0.7
        return
    means = pytest.approx([float(weight.mean()) for weight in smoothed], rel=1e-4)
    assert logged == {"lambda": means, "largest_lambda": pytest.approx([float(w.abs().max()) for w in smoothed])}
    assert before.abs().max() > 0


# --- Failed rounds, checkpoints ---------------------------------------------------------------------------------------


def probe_of(module, inputs=None):
    inputs = torch.linspace(-1, 1, 5 * 64).reshape(5, 1, 8, 8) if inputs is None else inputs
    with torch.no_grad():
        return copy.deepcopy(module).eval()(inputs)


def data(batch_size=8):
    return FederatedDataModule(
        models.as_datasets(models.images(FEW)), models.as_datasets(models.images({"ann": 9, "eve": 7})),
        batch_size=batch_size,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(
    ("operator", "eval_reference"),
    quick(itertools.product(OPERATORS, ["previous", "current"]), [("conv", "previous"), ("multi", "current")]),
)
def test_a_checkpoint_is_evaluated_as_its_model_was(
    operator, eval_reference, federated_trainer, plain_trainer, tmp_path
):
    """With new objects, in both kinds of Trainer, and for the fitted module without the callback."""
    logger, callback = MemoryLogger(), make(operator, eval_reference=eval_reference)
    saved = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    module = models.Module(Net(), models.momentum)
    trainer = federated_trainer(
        max_rounds=2, callbacks=[callback, saved], logger=logger, enable_checkpointing=True, seed=1
    )
    trainer.fit(module, datamodule=data())
    losses = [value for _, value in logger.curve("val_loss")]
    probes = [probe_of(module)]
    for epoch, loss in enumerate(losses):
        for make_trainer in (federated_trainer, plain_trainer):
            fresh = models.Module(Net(), models.momentum)
            again = make_trainer(callbacks=[make(operator, eval_reference=eval_reference)])
            again.validate(fresh, datamodule=data(), ckpt_path=tmp_path / f"epoch={epoch}.ckpt", verbose=False)
            assert again.callback_metrics["val_loss"].item() == loss
    probes.append(probe_of(fresh))
    plain_trainer().validate(module, datamodule=data(), verbose=False)
    assert plain_trainer(callbacks=[make(operator, eval_reference=eval_reference)]).validate(
        module, datamodule=data(), verbose=False
    ) == [{"val_loss": losses[-1], "val_acc": pytest.approx(logger.curve("val_acc")[-1][1])}]
    assert torch.equal(*probes)
    state = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["callbacks"]["FeatureFusion"]
    assert state["reference"].keys() == (find_fusion(module).frozen.entries if eval_reference == "previous" else set())


class Stop(L.Callback):
    def __init__(self, hook, batch=-1, round=1):
        setattr(self, hook, self.stop)
        self.batch, self.round, self.count = batch, round, 0

    def stop(self, trainer, module, *arguments):
        if trainer.current_epoch == self.round and not getattr(trainer, "sanity_checking", False):
            self.count += 1
            if self.count > self.batch:
                raise KeyError("broken off")


BREAKS = [("on_train_batch_end", 3), ("on_validation_start", 0)]


@pytest.mark.parametrize(
    ("operator", "hook", "batch"),
    quick(
        [(operator, *place) for operator in OPERATORS for place in BREAKS],
        [("conv", *BREAKS[0])],
    ),
)
def test_a_fit_that_is_resumed_is_the_same(operator, hook, batch, federated_trainer, tmp_path):
    """Interrupted in a visit, in a saved visit, or after aggregation: bit for bit."""

    def run(folder, rounds=3, callbacks=(), ckpt_path=None):
        torch.manual_seed(0)
        module, logger = models.Module(Net(), models.momentum), MemoryLogger()
        saved = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1, save_top_k=0)
        trainer = federated_trainer(
            max_rounds=rounds, callbacks=[make(operator), saved, *callbacks], enable_checkpointing=True,
            batch_norm="recalibrate", optimizer_state="keep", logger=logger, seed=2,
            availability=Availability(stragglers=0.4),
        )  # fmt: skip
        trainer.fit(module, datamodule=data(), ckpt_path=ckpt_path)
        return module, logger

    whole, logger = run(tmp_path / "whole")
    with pytest.raises(KeyError, match="broken off"):
        run(tmp_path / "broken", callbacks=[Stop(hook, batch)])
    torch.manual_seed(99)
    resumed, again = run(tmp_path / "broken", ckpt_path=tmp_path / "broken" / "last.ckpt")
    assert_same(state_of(whole), state_of(resumed))
    assert_same(find_fusion(whole).frozen.state(), find_fusion(resumed).frozen.state())
    assert again.curve("val_loss")[-2:] == logger.curve("val_loss")[-2:]


def test_a_round_that_comes_to_nothing_leaves_the_last_global_model(federated_trainer, monkeypatch):
    """The frozen extractor belongs to the restored model.

    Cases: interrupted in a visit; interrupted after aggregation during recalibration; no valid update; refused
    aggregate.
    """

    class SpoiledUpdate(FederatedCallback):
        changes_update = True

        def on_client_end(self, trainer, module, client, update):
            if trainer.current_epoch == 1:
                update.state[WEIGHT] = torch.full_like(update.state[WEIGHT], torch.nan)

    class SpoiledAggregate(FederatedCallback):
        def on_server_aggregate(self, trainer, module, state):
            if trainer.current_epoch == 1:
                state["net.features.0.weight"] = torch.full_like(state["net.features.0.weight"], torch.nan)

    def measure(*arguments):
        measured.append(arguments)
        if len(measured) == 2:
            raise KeyError("broken off")
        return measure_round(*arguments)

    def result(*callbacks, rounds=2, error=None):
        torch.manual_seed(0)
        module, options = models.Module(Net(), models.momentum), {"rounds": rounds, "batch_norm": "recalibrate"}
        with pytest.raises(error, match="broken off") if error else contextlib.nullcontext():
            fit(federated_trainer, make("multi"), module, callbacks=callbacks, **options)
        return {**state_of(module), "probe": probe_of(module)}, find_fusion(module).frozen.state()

    measured = []
    expected = result(rounds=1)
    results = [
        result(SpoiledUpdate()),
        result(SpoiledAggregate()),
        result(Stop("on_train_batch_end", 2), error=KeyError),
    ]
    monkeypatch.setattr("lightning_fed.batch_norm.measurement.measure_round", measure)
    results.append(result(error=KeyError))
    for state, reference in results:
        assert_same(state, expected[0])
        assert_same(reference, expected[1])


def test_a_fit_without_fusion_is_not_resumed_with_it(federated_trainer, tmp_path):
    """Weights can be loaded for a new fit or for validation; optimizer states cannot."""
    trainer = federated_trainer(max_rounds=1)
    module = models.Module(Net(), models.momentum)
    trainer.fit(module, datamodule=data())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    (expected,) = trainer.validate(module, datamodule=data(), verbose=False)
    again = federated_trainer(max_rounds=2, callbacks=[make("multi")])
    assert again.validate(
        models.Module(Net()), datamodule=data(), ckpt_path=tmp_path / "plain.ckpt", verbose=False
    ) == [expected]
    with pytest.raises(MisconfigurationException, match="Expected a checkpoint of a fit with fusion, but got one with"):
        again.fit(models.Module(Net(), models.momentum), datamodule=data(), ckpt_path=tmp_path / "plain.ckpt")
    fresh = models.Module(Net(), models.momentum)
    fresh.load_state_dict(torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"])
    federated_trainer(max_rounds=1, callbacks=[make("multi")]).fit(fresh, datamodule=data())
    none = federated_trainer(max_rounds=2, callbacks=[make("none")])
    none.fit(models.Module(Net(), models.momentum), datamodule=data(), ckpt_path=tmp_path / "plain.ckpt")


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_convolution_that_nobody_has_trained_is_told_of(federated_trainer, plain_trainer, tmp_path):
    """Evaluating a module without fusion warns, unless the operator has no effect; fits do not warn."""
    plain, fused = federated_trainer(max_rounds=1), federated_trainer(max_rounds=1, callbacks=[make("conv")])
    for name, trainer in (("plain", plain), ("fused", fused)):
        trainer.fit(models.Module(Net(), models.momentum), datamodule=data())
        trainer.save_checkpoint(tmp_path / name)
    images = DataLoader(models.images(FEW)["ann"][0], 13)
    message = "its new convolution has random weights"
    for options in ({}, {"ckpt_path": tmp_path / "plain"}):
        with pytest.warns(UserWarning, match=message):
            fused.validate(models.Module(Net()), datamodule=data(), verbose=False, **options)
        with pytest.warns(UserWarning, match=message):
            plain_trainer(callbacks=[make("conv")]).predict(models.Module(Net()), images, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*" + message)
        fused.validate(models.Module(Net()), datamodule=data(), ckpt_path=tmp_path / "fused", verbose=False)
        module = models.Module(Net(), models.momentum)
        fused.fit(module, datamodule=data())
        fused.validate(module, datamodule=data(), verbose=False)
        for second in (make("multi"), make("conv", conv_init="local")):
            trainer = plain_trainer(callbacks=[second])
            trainer.predict(models.Module(Net()), images, ckpt_path=tmp_path / "plain")


def test_before_the_first_round_both_references_are_one(federated_trainer):
    outputs = {}

    class Sanity(L.Callback):
        def on_validation_batch_end(self, trainer, module, *arguments):
            if trainer.sanity_checking:
                outputs.setdefault(name, module(arguments[1][0]).clone())

    for name in ("previous", "current"):
        torch.manual_seed(0)
        trainer = federated_trainer(
            max_rounds=1, callbacks=[make("conv", eval_reference=name), Sanity()], num_sanity_val_steps=2
        )
        trainer.fit(models.Module(Net()), datamodule=data())
    assert torch.equal(outputs["previous"], outputs["current"])


# --- Combinations -----------------------------------------------------------------------------------------------------

TOGETHER = {
    "fedmargin": {"method": "fedmargin"},
    "fedprox": {"method": "fedprox"},
    "fedavgm": {"method": "fedavgm"},
    "fedatt": {"method": "fedatt"},
    "fesem": {"method": "fesem", "clients_per_round": 3},
    "feddane": {"method": "feddane"},
    "head at home": {"personal": ["net.classifier.*"]},
    "operator at home": {"personal": ["feature_fusion.*"]},
    "operator frozen": {"frozen": ["feature_fusion.*"]},
    "batch norm recalibrated": {"batch_norm": "recalibrate"},
    "batch norm personal": {"batch_norm": "personal"},
    "batch norm frozen": {"batch_norm": "frozen"},
    "optimizer state kept": {"optimizer_state": "keep", "personal": ["net.classifier.*"]},
    "stragglers and dropouts": {"availability": Availability(stragglers=0.5, client_dropout=0.2)},
    "mixed precision": {"precision": "bf16-mixed"},
    "low precision": {"precision": "bf16-true"},
    "accumulation": {"accumulate_grad_batches": 2, "local_steps": 4},
}


@pytest.mark.parametrize(
    ("name", "operator"),
    quick(itertools.product(TOGETHER, ["conv", "multi"]), [("operator frozen", "conv")]),
)
@pytest.mark.filterwarnings("ignore:Adding .* is deprecated")
def test_together_with_everything_else(name, operator, federated_trainer):
    """The loss falls, operators with trainable weights move, and the frozen extractor equals the client's start."""
    options = TOGETHER[name]

    class Start(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            self.start = state_of(module.net.features)

        def on_client_end(self, trainer, module, client, update):
            assert_same(find_fusion(module).frozen.state(), self.start)
            count.append(client)

    count = []
    module, logger = models.Module(Net(), models.momentum), MemoryLogger()
    trainer = federated_trainer(
        max_rounds=4, callbacks=[Start(), make(operator)], logger=logger, seed=0,
        **{"batch_norm": "average", **({"local_epochs": 2} if "local_steps" not in options else {}), **options},
    )  # fmt: skip
    clients = models.as_datasets(models.images({"ann": 24, "bob": 20, "cid": 32}))
    trainer.fit(module, clients, models.as_datasets(models.images({"ann": 24, "cid": 8})))
    losses = [value for _, value in logger.curve("train_loss")]
    assert losses[-1] < 0.9 * losses[0]
    assert len(count) >= 4
    moved = find_fusion(module).operators["0"].weight.detach()
    if operator == "multi" and not {"frozen", "personal"} & options.keys():
        assert moved.any()
    if options.get("personal") == ["feature_fusion.*"]:
        assert operator == "conv" or not moved.any()  # weight on the server
        kept = [trainer.federation.store.get(client)[WEIGHT] for client in ("ann", "bob")]
        assert not torch.equal(*kept)


@pytest.mark.parametrize(
    "options", [{"operator": "single", "ema": 0}, {"operator": "single", "channels": 4}, {"operator": "none"}]
)
def test_together_with_few_classes_of_many(options, federated_trainer):
    """Clients hold some rows of the head behind the features; the frozen extractor has no head rows."""
    net = Net()
    net.classifier[1] = torch.nn.Linear(36, 40)
    task = ClassificationTask(net, num_classes=40, head="sampled_softmax", lr=0.1)
    clients = {client: (images, 7 * labels) for client, (images, labels) in models.images(FEW).items()}
    before, references = net.classifier[1].weight.detach().clone(), References()
    callbacks = [SampledSoftmax(5), *([] if options["operator"] == "none" else [references])]
    fit(federated_trainer, make(**options), task, clients, callbacks=callbacks, local_epochs=2)
    assert not torch.equal(net.classifier[1].weight, before)
    if options["operator"] != "none":
        assert find_fusion(task).operators["0"].weight.any()
        assert not any(value.shape == before.shape for value in references.after[0].values())
        assert references.after[0]


def test_the_preset_is_the_callback(federated_trainer):
    results = []
    for federation in (Federation(FedFusion("multi", ema=0.5), seed=1), Federation(seed=1)):
        callbacks = [] if federation.method.callbacks else [make("multi", ema=0.5)]
        trainer = federated_trainer(max_rounds=2, federation=federation, callbacks=callbacks)
        module = models.Module(Net(), models.momentum)
        trainer.fit(module, models.as_datasets(models.images(FEW)))
        results.append(state_of(module))
    assert_same(*results)
    assert WEIGHT in results[0]


def test_the_presets_arguments_are_the_callbacks():
    given = {
        "operator": "multi", "at": "net.features.0", "levels": [0], "ema": 0.5, "eval_reference": "current",
        "cache_global_features": True, "conv_init": "local", "conv_bias": False,
    }  # fmt: skip
    parameters = [name for name in inspect.signature(FedFusion).parameters if name != "aggregator"]
    assert sorted(parameters) == sorted(given)
    (callback,) = FedFusion(**given).callbacks
    assert {name: getattr(callback, name) for name in given} == given
    (callback,) = FedFusion().callbacks
    assert vars(callback) == vars(FeatureFusion())


def test_the_method_of_a_comparison():
    recipe = Federation(local_epochs=3)
    federation = MethodChoice.parse("fedfusion:operator=single:clients_per_round=5").federation(recipe)
    (callback,) = federation.method.callbacks
    assert (callback.operator, federation.arguments["clients_per_round"]) == ("single", 5)
    assert federation.schedule.local_epochs == 3
    choice = MethodChoice.parse("fedfusion:operator=conv:conv_init=local:cache_global_features=true")
    federation = choice.federation(recipe)
    (callback,) = federation.method.callbacks
    assert (callback.conv_init, callback.cache_global_features) == ("local", True)


def test_prototypes_are_measured_with_the_reference_of_the_visit(federated_trainer):
    class First(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            fusion = find_fusion(module)
            assert fusion.is_referring
            assert_same(fusion.frozen.state(), state_of(module.net.features))

    for callbacks in ([First(), make("conv")], [make("conv"), First()]):
        trainer = federated_trainer(max_rounds=2, method="fedmargin", callbacks=callbacks, batch_norm="average")
        trainer.fit(models.Module(Net()), models.as_datasets(models.images(FEW)))
        kinds = [type(callback) for callback in trainer.callbacks]
        assert kinds[0] is Federation
        assert kinds.index(FeatureFusion) < kinds.index(First)


def test_personal_batch_norm_has_the_clients_own_statistics_in_both_extractors(federated_trainer):
    frozen = {}

    class Start(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            frozen.setdefault(client, []).append(find_fusion(module).frozen.state()["1.running_mean"])

    module = models.Module(Net())
    trainer = federated_trainer(max_rounds=2, method=FedBN(), seed=0, callbacks=[Start(), make("conv")])
    trainer.fit(module, models.as_datasets(models.images(FEW)))
    assert not torch.equal(frozen["ann"][1], frozen["bob"][1])
    assert torch.equal(frozen["ann"][0], frozen["bob"][0])


class Evaluated(models.Module):
    def __init__(self, net, *arguments):
        super().__init__(net, *arguments)
        self.noted = Noted()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        fusion = find_fusion(self)
        reference = fusion.frozen.state() if fusion.is_referring else None
        self.noted.seen.append((len(batch[0]), state_of(self.net.features), reference))


class Noted:
    """State that a separate pass does not restore."""

    def __init__(self):
        self.seen = []


@pytest.mark.parametrize("kind", ["personal BatchNorm", "a personal layer"])
def test_clients_are_evaluated_with_their_own_entries_in_both_extractors(kind, federated_trainer):
    """The reference extractor combines the last broadcast with the client's entries, absent from the final model."""
    options, personal = {
        "personal BatchNorm": ({"batch_norm": "personal"}, "1."),
        "a personal layer": ({"personal": ["net.features.0.*"], "batch_norm": "average"}, "0."),
    }[kind]
    sizes = {"ann": 13, "bob": 8}
    module = Evaluated(Net(), models.momentum)
    recorder = Recorder()
    trainer = federated_trainer(max_rounds=3, callbacks=[make("conv"), recorder], seed=0, **options)
    held = models.as_datasets(models.images({"ann": 5, "bob": 6}))
    trainer.fit(module, datamodule=FederatedDataModule(models.as_datasets(models.images(sizes)), held, batch_size=8))
    rounds = [recorder.round(number) for number in range(3)]
    per_round = len(module.noted.seen) // 3
    for number, visits in enumerate(rounds):
        seen = module.noted.seen[per_round * number :][:per_round]
        of_clients = seen[-2:]
        assert [size for size, _, _ in of_clients] == [5, 6]
        for (_, now, reference), visit in zip(of_clients, visits, strict=True):
            for name, value in reference.items():
                if name.startswith(personal):  # the client's values from the last visit
                    assert torch.equal(value, now[name])
                    assert torch.equal(value, visit.end[f"net.features.{name}"])
                else:
                    assert torch.equal(value, visit.broadcast[f"net.features.{name}"])
        for _, now, reference in seen[:-2]:
            assert all(torch.equal(value, now[name]) for name, value in reference.items() if name.startswith(personal))
    final = find_fusion(module).frozen.state()
    assert all(
        torch.equal(value, Net().features.state_dict()[name]) for name, value in final.items() if personal in name
    )


@pytest.mark.parametrize("eval_reference", ["previous", "current"])
def test_statistics_are_measured_beside_what_evaluates(eval_reference, federated_trainer):
    """BatchNorm behind the features is recalibrated with the extractor used for evaluation."""

    class Measured(FederatedCallback):
        def __init__(self):
            self.seen, self.is_measuring = [], False

        def on_server_round_start(self, trainer, module):
            self.before = state_of(module.net.features)

        def on_server_aggregate(self, trainer, module, state):
            self.is_measuring = True

        def on_model_loaded(self, trainer, module, client):
            fusion = find_fusion(module)
            if self.is_measuring and client is not None:
                assert fusion.is_referring == (eval_reference == "previous")
                if fusion.is_referring:
                    assert_same(fusion.frozen.state(), self.before)
                self.seen.append(client)

        def on_server_round_end(self, trainer, module, is_new):
            self.is_measuring = False

    measured = Measured()
    callbacks = [make("conv", eval_reference=eval_reference)]
    fit(federated_trainer, None, callbacks=[*callbacks, measured], batch_norm="recalibrate")
    assert measured.seen == ["ann", "bob", "cid"] * 2


def test_one_of_several_models_is_evaluated_with_its_own_extractor(federated_trainer):
    module = Evaluated(Net(), models.momentum)
    federated_trainer(max_rounds=2, method="fesem", callbacks=[make("conv")], seed=0).fit(module, datamodule=data())
    assert len(module.noted.seen) > 4
    assert all(reference is None for _, _, reference in module.noted.seen)


def test_gradients_beforehand_are_those_of_a_visit(federated_trainer):
    """With one client FedDANE has no correction, provided that gradient pass and visit use the same reference."""
    results = []
    for aggregator in ("feddane", "fedavg"):
        torch.manual_seed(0)
        net = Net()
        net.features[3].p = 0.0  # both passes differentiate the same function
        results.append(
            state_of(
                fit(
                    federated_trainer, make("conv"), models.Module(net), models.images({"ann": 24}), rounds=3,
                    local_epochs=2, method=aggregator,
                )
            )
        )  # fmt: skip
    assert_same(*results)


# --- Models -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_deeplab_with_its_encoder_fused(federated_trainer, tmp_path):
    task = SegmentationTask(
        "DeepLabV3Plus", num_classes=3, encoder_name="mobilenet_v2", encoder_weights=None, lr=0.05,
        model_kwargs={"decoder_channels": 16},
    )  # fmt: skip
    clients, logger = models.scenes({"ann": 2, "bob": 2}), MemoryLogger()
    trainer = federated_trainer(max_rounds=2, callbacks=[make("multi", ema=0)], logger=logger, batch_norm="average")
    trainer.fit(task, models.as_datasets(clients))
    losses = [value for _, value in logger.curve("train_loss")]
    assert losses[-1] < losses[0]
    fusion = find_fusion(task)
    assert list(fusion.operators) == ["1", "2", "3", "4", "5"]
    assert fusion.operators["5"].weight.any()
    assert fusion.operators["2"].weight.any()
    assert not fusion.operators["1"].weight.any()  # DeepLabV3+ does not use this level
    images = clients["ann"][0]
    expected = copy.deepcopy(task).eval()
    find_fusion(expected).release()
    assert torch.equal(unwrap(task).eval()(images), expected(images))


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA}")
def test_deeplab_on_camvid(federated_trainer):
    data = CamVid(DATA, image_size=(32, 32), train_size=16, val_size=4, batch_size=4)
    task = SegmentationTask(
        "DeepLabV3Plus", num_classes=11, ignore_index=255, encoder_name="mobilenet_v2", encoder_weights=None, lr=0.1,
        model_kwargs={"decoder_channels": 16},
    )  # fmt: skip
    recorder = Recorder()
    trainer = federated_trainer(
        max_rounds=1, partition=IID(2), callbacks=[make("conv", levels=[2, -1], conv_init="local"), recorder]
    )
    trainer.fit(task, datamodule=data)
    assert list(find_fusion(task).operators) == ["2", "5"]
    start, end = recorder.visits[0].broadcast, recorder.aggregates[0]
    moved = [name for name in end if name.startswith("feature_fusion.") and not torch.equal(start[name], end[name])]
    assert len(moved) == 4
    assert torch.isfinite(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("name", quick(["resnet10t", "mobilenetv3_small_050"], []))
def test_classifiers_of_timm(name, federated_trainer):
    clients = {client: (images.repeat(1, 3, 4, 4), labels) for client, (images, labels) in models.images(PAIR).items()}
    task = ClassificationTask(timm.create_model(name, num_classes=3, drop_rate=0.1), num_classes=3, lr=0.05)
    recorder, references = Recorder(), References()
    fit(federated_trainer, make("single", ema=0), task, clients, callbacks=[recorder, references], rounds=1)
    fusion = find_fusion(task)
    assert fusion.operators["0"].weight.any()
    for visit, frozen in zip(recorder.visits, references.after, strict=True):
        assert_same(frozen, {name: visit.broadcast[f"model.{name}"] for name in frozen})
    assert not any("classifier" in name or "fc." in name for name in frozen)


def test_a_model_with_a_fused_extractor_of_its_own(federated_trainer):
    net = Net()
    net.features = FusedExtractor(net.features, "conv")
    module = fit(federated_trainer, make("conv"), models.Module(net, models.momentum), rounds=1)
    assert "net.features.feature_fusion.operators.0.weight" in module.state_dict()
    assert find_fusion(module) is net.features.feature_fusion
    twin = fit(federated_trainer, None, models.Module(Net(), models.momentum), rounds=1)
    assert not torch.equal(net.features.local[0].weight, twin.net.features[0].weight)


class Named(models.Module):
    """`configure_optimizers` names the trained parameters."""

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.net.parameters())
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def test_operators_train_whatever_the_optimizer_was_given(federated_trainer):
    results = []
    for kind in (models.Module, Named):
        scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
        module = kind(Net(), models.adam, *([scheduler] if kind is models.Module else []))
        torch.manual_seed(0)
        results.append(state_of(fit(federated_trainer, make("conv"), module)))
    assert_same(*results)
    with pytest.raises(MisconfigurationException, match="to train the parameters of `feature_fusion`"):
        fit(federated_trainer, make("conv"), Named(Net(), torch.optim.Adagrad))


@pytest.mark.slow
def test_a_net_that_is_compiled(federated_trainer):
    results = []
    for net in (Net(), torch.compile(Net(), backend="eager")):
        torch.manual_seed(0)
        recorder = Recorder()
        fit(federated_trainer, make("conv"), models.Module(net), callbacks=[recorder], rounds=2)
        results.append({name.replace("_orig_mod.", ""): value for name, value in recorder.aggregates[-1].items()})
    torch.testing.assert_close(*results)


# --- Module after the fit ---------------------------------------------------------------------------------------------


def test_fits_one_after_another(federated_trainer, plain_trainer, tmp_path):
    """Fusion is inserted once; a second fit starts from the model's extractor; the fitted module can be used."""
    module = fit(federated_trainer, make("conv"))
    fusion = find_fusion(module)
    assert fusion.is_referring
    seen = []

    class See(L.Callback):
        def on_train_start(self, trainer, module):
            seen.append(find_fusion(module).is_referring)

    again = fit(federated_trainer, make("conv"), module, callbacks=[See()])
    assert find_fusion(again) is fusion
    assert seen == [False]
    callback = make("conv")
    trainer = federated_trainer(max_rounds=1, callbacks=[callback, See()], seed=0)
    trainer.fit(module, models.as_datasets(models.images(FEW)))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, models.as_datasets(models.images(FEW)))
    assert seen[-2:] == [False, True]
    images = models.images(FEW)["ann"][0]
    outputs = plain_trainer().predict(module, DataLoader(images, 13))
    assert torch.equal(outputs[0], module.eval()(images))
    plain_trainer(max_epochs=1).fit(module.train(), DataLoader(TensorDataset(*models.images(FEW)["ann"]), 13))
    assert len(module.net.features._forward_hooks) == 1  # noqa: SLF001 - nothing piles up


def test_another_fusion_is_refused(federated_trainer):
    module = fit(federated_trainer, make("multi"), rounds=1)
    with pytest.raises(
        MisconfigurationException, match=r"but the module has 'multi' at the output of 'net.features': remove"
    ):
        fit(federated_trainer, make("conv"), module, rounds=1)
    with pytest.raises(MisconfigurationException, match=r"with 'multi' at 'net.features.0', but the module has"):
        fit(federated_trainer, make("multi", at="net.features.0"), module, rounds=1)
    fit(federated_trainer, make("multi", at="net.features"), module, rounds=1)
    for options in ({"levels": [0]}, {"channel_axis": 2}):
        (name,) = options
        with pytest.raises(MisconfigurationException, match=rf"with {name}=.*, but the fusion has {name}="):
            fit(federated_trainer, make("multi", **options), module, rounds=1)
    fit(federated_trainer, make("conv"), unwrap(module), rounds=1)


class Late(models.Module):
    def __init__(self):
        super().__init__(None)

    def configure_model(self):
        self.net = Net()


class Aside(models.Module):
    def training_step(self, batch, batch_idx):
        features = batch[0]
        for layer in self.net.features:
            features = layer(features)
        return self.loss(self.net.classifier(features), batch[1])


@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        (Late, {}, ValueError, r"name the feature layer .*Create layers in `__init__`"),
        (lambda: Aside(Net()), {}, MisconfigurationException, "the network Sequential .* but no batch reached this"),
        (lambda: models.Module(Net()), {"at": "net.nothing"}, ValueError, "but got 'net.nothing': 'net' has"),
        (lambda: models.Module(Net()), {"levels": [3]}, ValueError, "Expected `levels` to be among"),
    ],
)
def test_models_that_cannot_be_fused(module, options, error, message, federated_trainer):
    with pytest.raises(error, match=message):
        fit(federated_trainer, make("conv", **options), module())


def test_a_fit_needs_a_federation(plain_trainer):
    with pytest.raises(MisconfigurationException, match="with a `Federation` callback, but got none"):
        plain_trainer(max_epochs=1, callbacks=[make()]).fit(models.Module(Net()), DataLoader(torch.zeros(2, 1, 8, 8)))
    with pytest.raises(RuntimeError, match="but `setup` has not run yet"):
        _ = make().fusion


def test_neurons_that_change_places_are_refused(federated_trainer):
    with pytest.raises(MisconfigurationException, match="without neuron matching, but got FedMA"):
        fit(federated_trainer, make("conv"), method="fedma")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operator": "sum"}, "Expected `operator` to be one of"),
        ({"ema": 1.0}, r"Expected `ema` to be in \[0, 1\), but got 1.0"),
        ({"eval_reference": "next"}, "Expected `eval_reference` to be one of"),
        ({"conv_init": "zeros"}, "Expected `init` to be one of"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        FeatureFusion(**options)


# --- Cache ------------------------------------------------------------------------------------------------------------


class Flipped(Dataset):
    """Images with a random shift at every access."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index] + 0.01 * torch.randn(()), self.labels[index]


class Passes(FederatedCallback):
    """Counts the images passed to the frozen extractor in every visit."""

    def __init__(self):
        self.counts = []

    def on_client_start(self, trainer, module, client, broadcast):
        self.counts.append(0)
        if len(self.counts) == 1:
            frozen = find_fusion(module).frozen.network
            frozen.register_forward_pre_hook(self.count)

    def count(self, network, args):
        self.counts[-1] += len(args[0])


def test_cached_features_give_the_same_fit(federated_trainer):
    results = []
    for cached in (False, True):
        torch.manual_seed(0)
        passes, recorder = Passes(), Recorder()
        fit(
            federated_trainer, make("conv", cache_global_features=cached), callbacks=[passes, recorder],
            local_epochs=3,
        )  # fmt: skip
        results.append((passes.counts, recorder.aggregates[0]))
    sizes = list(FEW.values())
    assert results[0][0] == [3 * size for size in sizes] * 2
    assert results[1][0] == sizes * 2
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)


def test_augmented_images_are_never_taken_for_others(federated_trainer):
    """Without a cache hit the cache warns once and stops storing; weights and logs equal a fit without cache."""
    results = []
    for cached in (False, True):
        torch.manual_seed(0)
        module = models.Module(Net(), models.momentum)
        callback, passes = make("conv", cache_global_features=cached), Passes()
        trainer = federated_trainer(
            max_rounds=2, local_epochs=3, seed=1, callbacks=[callback, passes], batch_norm="average"
        )
        clients = {name: Flipped(*tensors) for name, tensors in models.images(FEW).items()}
        if cached:
            with pytest.warns(UserWarning, match="`cache_global_features` is disabled: in a second pass") as caught:
                trainer.fit(module, clients)
            assert sum("cache_global_features" in str(warning.message) for warning in caught) == 1
        else:
            trainer.fit(module, clients)
        results.append((state_of(module), passes.counts))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_a_network_of_several_inputs_is_told_to_keep_nothing(federated_trainer):
    class Named(models.Module):
        def forward(self, inputs):
            return self.net(inputs=inputs)

    with pytest.warns(UserWarning, match="has no effect: the inputs of Net are not a single tensor"):
        fit(
            federated_trainer, make("conv", at="net.features", network="net", cache_global_features=True), Named(Net()),
            local_epochs=2,
        )  # fmt: skip


def test_visits_of_one_epoch_keep_nothing(federated_trainer):
    class See(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            seen.append(find_fusion(module).cache)

        def on_client_visit_end(self, trainer, module, client):
            assert find_fusion(module).cache is None

    seen = []
    fit(federated_trainer, make("conv", cache_global_features=True), callbacks=[See()])
    assert seen == [None] * 6
    fit(federated_trainer, make("conv", cache_global_features=True), callbacks=[See()], local_epochs=2)
    assert None not in seen[6:]
    assert len(set(map(id, seen[6:]))) == 6
