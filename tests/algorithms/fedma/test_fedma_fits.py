"""FedMA in a fit: interruptions, checkpoints, other widths in later fits, errors."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import FedAvg, FedMA
from lightning_fed.callbacks import FederatedCallback, LayerwiseTraining
from lightning_fed.matching import PermutationGroup
from tests import models
from tests.algorithms.fedma.fits import Stop, data_of, examples, fit, mlp, momentum, norm_net, parts
from tests.breadth import quick, slow
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


# --- Interruptions and checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("round", "store"),
    quick(itertools.product([1, 3, 4], ["memory", "folder"]), [(4, "folder")]),
)
def test_resumed_in_a_pass_it_ends_with_the_same_model(federated_trainer, tmp_path, round, store):
    """Between stages, and after the model has grown; the resumed module starts with the original widths."""

    def make(name, *callbacks):
        return federated_trainer(
            max_rounds=6,
            method=FedMA("grow", score="published", gamma=7.0, max_width=None),
            callbacks=list(callbacks),
            enable_checkpointing=bool(callbacks),
            store=None if store == "memory" else tmp_path / name,
            clients_per_round=2,  # so that passes include new clients and clients without a stored model
        )

    whole = models.Module(norm_net(), momentum)
    expected = fit(make("whole"), whole, data_of(parts(), 4)).callback_metrics
    saver = ModelCheckpoint(tmp_path / "saved", save_last=True, save_on_train_epoch_end=True)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(make("broken", saver, Stop(round, 3)), models.Module(norm_net(), momentum), data_of(parts(), 4))
    resumed = models.Module(norm_net(), momentum)
    trainer = make("broken", saver)
    fit(trainer, resumed, data_of(parts(), 4), ckpt_path=tmp_path / "saved" / "last.ckpt")
    for name in ("comm/total_up_bytes", "comm/total_down_bytes"):
        assert trainer.callback_metrics[name] == expected[name]
    assert len(state_of(whole)["net.0.bias"]) > 6
    assert all(torch.equal(value, state_of(resumed)[name]) for name, value in state_of(whole).items())


def test_validation_and_checkpoints_go_on_with_a_grown_model(federated_trainer, tmp_path):
    """Equal scores in the same process, in a new module from the checkpoint, and in prediction."""
    clients_data = parts()
    validation = DataLoader(TensorDataset(*examples(9, 40)), 16)
    saver = ModelCheckpoint(tmp_path, save_last=True)
    rule = FedMA("grow", score="published", gamma=7.0, max_width=None)
    trainer = federated_trainer(max_rounds=3, method=rule, callbacks=[saver], enable_checkpointing=True)
    module = models.Module(mlp(), momentum)
    trainer.fit(module, {client: TensorDataset(*part) for client, part in clients_data.items()}, validation)
    expected = trainer.callback_metrics["val_loss"]
    assert trainer.validate(module, validation, verbose=False)[0]["val_loss"] == pytest.approx(float(expected))
    fresh = models.Module(mlp(seed=8), momentum)
    second_trainer = federated_trainer(max_rounds=3, method=FedMA(), callbacks=[saver], enable_checkpointing=True)
    scores = second_trainer.validate(fresh, validation, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert scores[0]["val_loss"] == pytest.approx(float(expected))
    assert fresh.net[0].out_features > 7


@pytest.mark.parametrize("kind", ["fedma", "of another rule"])
def test_a_checkpoint_with_other_classes_is_refused(federated_trainer, tmp_path, kind):
    """FedMA cannot have grown to these widths, so the checkpoint has another architecture."""
    saver = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)

    def run(aggregator, rounds, widths, **arguments):
        module = models.Module(mlp(widths), momentum)
        trainer = federated_trainer(max_rounds=rounds, method=aggregator, callbacks=[saver], enable_checkpointing=True)
        try:
            fit(trainer, module, data_of(parts()), **arguments)
        finally:
            run.module = module

    run(FedMA(score="published", gamma=7.0) if kind == "fedma" else FedAvg(), 3, (4, 7, 6, 5))
    words = r"but 'net\.4\.weight' has shape \(5, \d+\) in the checkpoint, and \(3, 6\) in the module"
    with pytest.raises(
        ValueError, match=words if kind == "fedma" else "Expected `method` to be FedAvg, as in the checkpoint"
    ):
        run(FedMA(), 6, (4, 7, 6, 3), ckpt_path=tmp_path / "last.ckpt")
    if kind == "fedma":
        assert run.module.net[4].out_features == 3
        module = models.Module(mlp(), momentum)
        trainer = federated_trainer(max_rounds=3, method=FedMA())
        with pytest.raises(ValueError, match=words):
            trainer.predict(module, DataLoader(torch.zeros(4, 4), 2), ckpt_path=tmp_path / "last.ckpt")
        assert [module.net[index].out_features for index in (0, 4)] == [7, 3]


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "shrink"}, "mode"),
        ({"last_layer": "mean"}, "last_layer"),
        ({"initial": "zero"}, "initial"),
        ({"max_width": 0.5}, "max_width"),
        ({"max_width": float("inf")}, "`max_width` to be at least 1 and finite, 'auto' or None, but got inf"),
        ({"seed": -1}, "`seed` to be at least 0, but got -1"),
        ({"seed": 0.5}, "`seed` to be a whole number"),
        ({"stages": 1.5}, r"`stages` to be 'auto', .* but got 1\.5"),
        ({"stages": 0}, "but got 0"),
        ({"stages": True}, "but got True"),
        ({"stages": "all"}, "but got 'all'"),
        ({"stages": []}, r"but got \[\]"),
        ({"stages": ["net.0.*", "*"]}, r"a list with the patterns of each stage, but got \['net"),
        ({"gamma": 0.0}, "gamma"),
        ({"passes": -1}, "passes"),
        ({"prior_weight": -1.0}, "prior_weight"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        FedMA(**options)


def test_what_cannot_be_in_a_fit(federated_trainer):

    def run(rule=None, optimizer=momentum, **arguments):
        trainer = federated_trainer(max_rounds=2, method=rule or FedMA(), **arguments)
        fit(trainer, models.Module(mlp(), optimizer), data_of(parts()))

    with pytest.raises(MisconfigurationException, match="optimizer_state='reset'"):
        run(optimizer_state="keep")
    with pytest.raises(MisconfigurationException, match="Adagrad"):
        run(optimizer=torch.optim.Adagrad)
    with pytest.raises(MisconfigurationException, match=r"but got FedAvg\."):
        run(FedAvg(), callbacks=[LayerwiseTraining()])
    with pytest.raises(MisconfigurationException, match="shared entries, but got none: all entries are personal or"):
        run(frozen=["*"])
    with pytest.raises(ValueError, match=r"no pattern matches 'net\.4\.weight'"):
        run(FedMA(stages=[["net.0.*"], ["net.2.*"]]))

    class Never(FederatedCallback):
        def on_train_start(self, trainer, pl_module):
            raise AssertionError("it was to be refused before anything trains")

    with pytest.raises(MisconfigurationException, match="other than LBFGS for FedMA"):
        run(FedMA(), torch.optim.LBFGS, callbacks=[Never()])


@pytest.mark.parametrize("options", [{"mode": "permute"}, slow({"mode": "none"}), {"stages": 1, "max_width": None}])
def test_lbfgs_trains_where_nothing_grows_in_a_pass(federated_trainer, options):
    """With one exchange layers grow too, but clients train at constant widths, as LBFGS requires."""
    module = models.Module(mlp(), lambda parameters: torch.optim.LBFGS(parameters, lr=0.05, max_iter=3))
    rule = FedMA(score="published", gamma=7.0, **options)
    trainer = federated_trainer(max_rounds=3, method=rule)
    fit(trainer, module, data_of(parts()))
    assert (module.net[0].out_features > 7) == ("stages" in options)
    with torch.no_grad():
        before, after = (sum(F.cross_entropy(net(x), y) for x, y in parts().values()) for net in (mlp(), module))
    assert after < before


def test_groups_of_the_users_grow_with_a_model_that_is_resumed(federated_trainer, tmp_path):
    """Groups are given at client widths, independent of the widths in the checkpoint."""
    saver = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    state = models.Module(mlp()).state_dict()
    axes = {("net.0.weight", 0): "out", ("net.0.bias", 0): "vec", ("net.2.weight", 1): "in"}
    extra = PermutationGroup.over(state, axes, 7)

    def run(rounds, **arguments):
        module = models.Module(mlp(), momentum)
        trainer = federated_trainer(
            max_rounds=rounds,
            method=FedMA(score="published", gamma=7.0, max_width=None),
            callbacks=[saver, LayerwiseTraining(extra_groups=[extra])],
            enable_checkpointing=True,
        )
        fit(trainer, module, data_of(parts()), **arguments)
        return state_of(module)

    whole = run(4)
    assert len(run(3)["net.0.bias"]) > 7
    assert_same(run(4, ckpt_path=tmp_path / "last.ckpt"), whole)


def test_the_stages_of_a_pass_that_goes_on_cannot_change(federated_trainer, tmp_path):
    """A Trainer only continues with the same model, a checkpoint only with the same stages."""
    saver = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)

    def run(rule, rounds, **arguments):
        trainer = federated_trainer(max_rounds=rounds, method=rule, callbacks=[saver], enable_checkpointing=True)
        fit(trainer, models.Module(mlp(), momentum), data_of(parts()), **arguments)
        return trainer

    trainer = run(FedMA(score="published", gamma=7.0), 5)
    for stages in (1, [["net.0.*", "net.2.*"], ["net.4.weight"], ["*"]]):
        with pytest.raises(ValueError, match=r"the first 2 of \d stages \(sets of layers\) to equal the checkpoint's"):
            run(FedMA(stages=stages), 6, ckpt_path=tmp_path / "last.ckpt")
    trainer.fit_loop.max_epochs = 6
    with pytest.raises(MisconfigurationException, match="a new Trainer with a new `Federation`"):
        fit(trainer, models.Module(mlp(), momentum), data_of(parts()))


def test_a_module_whose_inputs_are_not_found_says_what_to_give(federated_trainer):
    class Two(models.Module):
        def forward(self, words, mask):
            return self.net(words * mask)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch["tokens"], batch["mask"]), batch["label"])

    data = {
        client: [{"tokens": row, "mask": torch.ones(4), "label": label} for row, label in zip(*part, strict=True)]
        for client, part in parts().items()
    }
    module = Two(mlp(), momentum)
    with pytest.raises(MisconfigurationException, match="Alternatively, pass an `example_input`"):
        fit(federated_trainer(max_rounds=3, method=FedMA()), module, FederatedDataModule(data, batch_size=4))
    side = LayerwiseTraining(example_input={"words": torch.randn(2, 4), "mask": torch.ones(2, 4)})
    trainer = federated_trainer(max_rounds=3, method=FedMA(score="published", gamma=7.0), callbacks=[side])
    fit(trainer, module, FederatedDataModule(data, batch_size=4))
    assert module.net[0].out_features > 7


@pytest.mark.parametrize(
    ("rounds", "patience", "texts"), [(4, 3, ["the last 1 of 4"]), (3, 2, ["a patience of 2"]), (3, 3, [])]
)
def test_rounds_of_which_nothing_comes_are_named(federated_trainer, caplog, rounds, patience, texts):
    stopping = EarlyStopping("train_loss", patience=patience)
    trainer = federated_trainer(max_rounds=rounds, method=FedMA(), callbacks=[stopping])
    fit(trainer, models.Module(mlp(), momentum), data_of(parts()))
    warned = [record.getMessage() for record in caplog.records if record.name.endswith("fedma.checks")]
    assert len(warned) == len(texts)
    assert all(text in message for text, message in zip(texts, warned, strict=True))


def test_counts_that_cannot_be_leave_the_client_out(federated_trainer, caplog):
    """The server knows the correct counts, so even the first message can be refused."""
    received = []
    breaks = [
        lambda counts: counts - 1000,
        lambda counts: counts[:2],
        lambda counts: torch.cat([counts, counts]),
        lambda counts: counts + 0.5,
        lambda counts: counts / 0,
    ]

    class Broken(FederatedCallback):
        def on_server_receive(self, trainer, module, update):
            if "fedma:counts" in update.extras:
                if len(received) < len(breaks):
                    update.extras["fedma:counts"] = breaks[len(received)](update.extras["fedma:counts"])
                received.append(update.client)

    trainer = federated_trainer(max_rounds=3, method=FedMA(), callbacks=[Broken()])
    fit(trainer, models.Module(mlp(), momentum), data_of(parts([9, 14, 6] * 2 + [8], [3] * 7)))
    assert len(received) == 7
    assert list(trainer.federation.server.report.failed) == received[:5]
    assert all(f"client '{client}' is excluded: " in caplog.text for client in received[:5])
    assert "fedma/growth" in trainer.callback_metrics


def test_targets_without_classes_are_averaged_by_size(federated_trainer):
    clients_data = {c: (part[0], part[0][:, :3].clone()) for c, part in parts().items()}
    states = []
    for last in ("class", "size"):
        module = models.Module(mlp(), momentum, loss=F.mse_loss)
        trainer = federated_trainer(max_rounds=3, method=FedMA(last_layer=last))
        if last == "class":
            with pytest.warns(UserWarning, match="by numbers of examples, .* but no layer does: give"):
                fit(trainer, module, data_of(clients_data))
        else:
            fit(trainer, module, data_of(clients_data))
        states.append(state_of(module))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


class TwoTargets(models.Module):
    """Trains on the third tensor of a batch; ``change`` makes the labels in the loss."""

    def __init__(self, change):
        super().__init__(mlp(), momentum)
        self.change = change

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), self.change(batch[2]))


def test_a_class_that_the_loss_ignores_is_not_counted(federated_trainer):
    counts = {}

    class Watch(FederatedCallback):
        def on_server_receive(self, trainer, module, update):
            if "fedma:counts" in update.extras:
                counts[update.client] = update.extras["fedma:counts"].tolist()

    trainer = federated_trainer(max_rounds=3, method=FedMA(), callbacks=[Watch()])
    module = models.Module(mlp(), momentum, loss=lambda x, y: F.cross_entropy(x, y, ignore_index=0))
    fit(trainer, module, data_of(parts()))
    assert counts == {client: [0, *torch.bincount(y, minlength=3)[1:].tolist()] for client, (_, y) in parts().items()}
    assert not trainer.federation.server.report.failed


@pytest.mark.parametrize("is_known", [True, False])
def test_classes_are_counted_by_the_labels_in_the_loss(is_known, federated_trainer):
    """The usual second tensor has other classes."""
    counts = {}

    class Watch(FederatedCallback):
        def on_server_receive(self, trainer, module, update):
            if "fedma:counts" in update.extras:
                counts[update.client] = update.extras["fedma:counts"].tolist()

    clients = {client: (x, (y + 1) % 3, y) for client, (x, y) in parts().items()}
    trainer = federated_trainer(max_rounds=3, method=FedMA(), callbacks=[Watch()])
    module = TwoTargets(torch.Tensor.clone if is_known else lambda labels: 2 - labels)
    with (
        nullcontext()
        if is_known
        else pytest.warns(UserWarning, match="labels in the loss .* one tensor from the batch")
    ):
        fit(trainer, module, data_of(clients))
    expected = {client: torch.bincount(y, minlength=3).tolist() for client, (_, _, y) in clients.items()}
    assert counts == (expected if is_known else {})
