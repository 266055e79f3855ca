"""Lightning and torch internals used by the rounds: a failing test names the changed internal."""

import copy
import dataclasses
import inspect
import warnings
from datetime import timedelta
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.func import vmap
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.callbacks.logged_values import LogCall
from lightning_fed.data import LoaderDataModule
from lightning_fed.lightning import internals
from tests import models
from tests.recorders import MemoryLogger, loading

CONNECTOR = "lightning.pytorch.trainer.connectors.data_connector"
BATCHES = 3


class Net(L.LightningModule):
    """Records the value of an internal function in each batch, over two steps."""

    def __init__(self, look=lambda trainer, module: None):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.look, self.seen = look, []

    def train_dataloader(self):
        return DataLoader(torch.ones(BATCHES, 2), batch_size=1)

    def training_step(self, batch, batch_idx):
        self.seen.append(self.look(self.trainer, self))
        return self.layer(batch).sum()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


@pytest.fixture
def fit(plain_trainer):
    def run(look=lambda trainer, module: None, module=None, **options):
        module = Net(look) if module is None else module
        trainer = plain_trainer(**{"max_epochs": 1, **options})
        trainer.fit(module)
        return trainer, module

    return run


def test_a_method_on_the_instance_is_called_and_counts_as_overridden(fit):
    called, module = [], Net()
    method = internals.OverriddenMethod(module, "on_train_epoch_end", lambda: called.append(True))
    fit(module=module)
    assert called, "Lightning does not look up a module's hooks on the instance any more"
    assert not internals.is_overridden("on_train_epoch_end", module), (
        "Lightning does not look through `__wrapped__` any more to see whether a hook is overridden"
    )
    step = internals.OverriddenMethod(module, "training_step", lambda *arguments: None)
    assert internals.is_overridden("training_step", module)
    assert copy.deepcopy(module).training_step.__self__ is not module
    method.restore()
    step.restore()
    assert not vars(module).keys() & {"on_train_epoch_end", "training_step"}


def test_a_warning_is_ignored_until_it_is_restored():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with internals.ignored_warning("on purpose"):
            warnings.warn("on purpose", stacklevel=1)
        assert not shown, "`warnings.filterwarnings` does not put the newest filter first any more"
        warnings.warn("on purpose", stacklevel=1)
        assert shown, "`warnings.filters` is not the list of filters any more"


def test_a_filter_of_the_user_stays():
    """An equal filter, and the filter of an outer fit."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "on purpose")
        with internals.ignored_warning("of the outer fit"):
            for text in ("on purpose", "of the outer fit"):
                with internals.ignored_warning(text):
                    pass
                warnings.warn(text, stacklevel=1)
        assert not shown


def test_a_warning_about_another_module_is_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with internals.ignored_warning("old", r"lightning\.pytorch\."):
            for module in ("lightning.pytorch.utilities", "project"):
                warnings.warn_explicit("old", FutureWarning, "file.py", 1, module)
    assert len(shown) == 1


def test_callbacks_are_a_list_that_the_trainer_calls_from(fit):
    class Added(L.Callback):
        was_called = False

        def on_train_start(self, trainer, module):
            self.was_called = True

    class Adds(L.Callback):
        def setup(self, trainer, module, stage):
            internals.callbacks_of(trainer).append(added)

    added = Added()
    fit(callbacks=[Adds()])
    assert added.was_called, "Lightning does not call callbacks that were added to `trainer.callbacks` any more"


def test_the_datamodule_is_known(plain_trainer):
    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(torch.ones(BATCHES, 2), batch_size=1)

    data, module = Data(), Net(lambda trainer, module: internals.datamodule_of(trainer))
    trainer = plain_trainer(max_epochs=1)
    assert internals.datamodule_of(trainer) is None
    trainer.fit(module, datamodule=data)
    assert module.seen[0] is data, "Lightning does not keep the datamodule as `trainer.datamodule` any more"


def test_data_that_are_handed_over_are_found_and_replaced(plain_trainer):
    """In ``setup``, the fit loop's source determines the later loaders."""
    train, val, other = (DataLoader(torch.full((BATCHES, 2), value), batch_size=1) for value in (1.0, 2.0, 3.0))
    found = []

    class Exchange(L.Callback):
        def setup(self, trainer, pl_module, stage):
            found.append(internals.handed_data(trainer))
            if found[0][0] is not None:
                self.restore = internals.replace_handed_data(trainer, LoaderDataModule(other, other))

        def teardown(self, trainer, pl_module, stage):
            self.restore()
            found.append((internals.handed_data(trainer), internals.datamodule_of(trainer)))

    module = Net()
    module.training_step = lambda batch, batch_idx: module.seen.append(float(batch[0, 0])) or module.layer(batch).sum()
    module.validation_step = lambda batch, batch_idx: module.seen.append(-float(batch[0, 0]))
    plain_trainer(max_epochs=1, callbacks=[Exchange()]).fit(module, train, val)
    assert found == [(train, val), ((train, val), None)], "Lightning keeps data that are handed to `fit` elsewhere"
    assert module.seen == [3.0] * BATCHES + [-3.0] * BATCHES, "Lightning asks something else for loaders"
    trainer = plain_trainer(max_epochs=1)
    trainer.fit(Net())
    assert internals.handed_data(trainer) == (None, None)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=None))  # a Lightning version without sources
    assert internals.handed_data(SimpleNamespace(fit_loop=loop)) == (None, None)


def test_the_method_of_the_trainer_that_was_called(fit, plain_trainer):
    module = Net(lambda trainer, module: (internals.is_fitting(trainer), internals.is_validating(trainer)))
    module.validation_step = lambda batch, batch_idx: module.seen.append(module.look(module.trainer, module))
    module.val_dataloader = module.train_dataloader
    trainer, _ = fit(module=module, num_sanity_val_steps=0)
    assert set(module.seen) == {(True, False)}, "`trainer.state.fn` is not that of `fit` any more in its validation"
    module.seen.clear()
    trainer.validate(module)
    assert set(module.seen) == {(False, True)}, "`trainer.state.fn` does not say any more that `validate` was called"


def test_loaders_are_asked_for_again(plain_trainer):
    asked, module = [], Net()
    loader = module.train_dataloader
    module.train_dataloader = lambda: asked.append(True) or loader()
    trainer = plain_trainer(max_epochs=3)
    assert internals.exchange_reload_interval(trainer, 1) == 0
    trainer.fit(module)
    assert len(asked) == 3, "`trainer.reload_dataloaders_every_n_epochs` is not read in every epoch any more"


def test_a_trainer_says_the_stage_that_it_was_given(plain_trainer):
    trainer = plain_trainer()
    before = internals.exchange_stage(trainer, "validation")
    assert trainer.validating, "`trainer.state.stage` is not what `trainer.validating` reads any more"
    assert internals.exchange_stage(trainer, "test") == "validate"
    assert trainer.testing
    internals.exchange_stage(trainer, before)
    assert not trainer.testing


@pytest.mark.skipif(L.__version__.startswith("2.5."), reason="new in Lightning 2.6")
def test_a_validation_has_a_time(plain_trainer):
    trainer = plain_trainer(max_epochs=1, val_check_interval=timedelta(hours=1))
    assert internals.exchange_validation_time(trainer, None) is None
    trainer.fit(Net())
    assert internals.exchange_validation_time(trainer, 7.0) is not None, "Lightning keeps the time elsewhere"
    assert internals.exchange_validation_time(trainer, None) == 7.0
    assert internals.exchange_validation_time(trainer, None) == 7.0


def test_loaders_to_overfit_do_not_shuffle():
    loader = DataLoader(torch.ones(3), shuffle=True)
    several = CombinedLoader([loader, loader])
    with pytest.warns(UserWarning, match="requested to overfit"):
        changed, combined = internals.loader_to_overfit(loader), internals.loader_to_overfit(several)
    assert isinstance(changed, DataLoader), "Lightning gives another kind of loader than before"
    samplers = [each.sampler for each in (changed, *combined.flattened)]
    assert all(isinstance(sampler, torch.utils.data.SequentialSampler) for sampler in samplers)
    assert several.flattened == [loader, loader], "the user's own are changed"


def test_lightning_advises_on_workers(plain_trainer, monkeypatch):
    monkeypatch.setattr(f"{CONNECTOR}.suggested_max_num_workers", lambda devices: 8)
    with pytest.warns(UserWarning, match="'train_dataloader' does not have many workers"):
        internals.advise_workers(plain_trainer(), Net().train_dataloader())


def test_the_last_batch_is_what_it_was_made(fit):
    def look(trainer, module):
        before = trainer.is_last_batch
        assert internals.exchange_last_batch(trainer, not before) == before
        changed = trainer.is_last_batch
        internals.exchange_last_batch(trainer, before)
        return before, changed

    _, module = fit(look)
    assert module.seen == [(False, True)] * (BATCHES - 1) + [(True, False)], (
        "`trainer.is_last_batch` is not read from the epoch loop's batch progress any more"
    )


def test_a_checkpoint_becomes_one_of_the_epochs_start(fit, plain_trainer, tmp_path):
    path, start = tmp_path / "a.ckpt", {}

    class Saves(L.Callback):
        def on_train_epoch_start(self, trainer, module):
            start["progress"] = trainer.global_step, internals.fit_progress(trainer)

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            assert internals.batches_in_epoch(trainer) == batch_idx + 1
            if batch_idx == 1:
                trainer.save_checkpoint(path)

        def on_save_checkpoint(self, trainer, module, checkpoint):
            internals.restart_epoch(checkpoint, *start["progress"], window=1)

    fit(callbacks=[Saves()])
    resumed = Net()
    again = plain_trainer(max_epochs=1)
    again.fit(resumed, ckpt_path=path, **loading(weights_only=False))
    assert len(resumed.seen) == BATCHES, "Lightning's checkpoints count the batches of an epoch in another way"
    assert internals.log_position(again) == BATCHES, "a fit that is resumed inside an epoch logs at other positions"


def test_a_checkpoint_becomes_one_of_the_epochs_end(fit, plain_trainer, tmp_path):
    path = tmp_path / "a.ckpt"

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == BATCHES - 1 and trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

        def on_save_checkpoint(self, trainer, module, checkpoint):
            internals.complete_epoch(checkpoint)

    fit(callbacks=[Saves()])
    resumed = Net(lambda trainer, module: trainer.current_epoch)
    plain_trainer(max_epochs=2).fit(resumed, ckpt_path=path, **loading(weights_only=False))
    assert resumed.seen == [1] * BATCHES, "Lightning's checkpoints mark the end of an epoch in another way"


def test_a_checkpoint_waits_for_validation(fit, plain_trainer, tmp_path):
    """Saved after the last batch of an epoch: the resumed fit validates, then trains the next epoch."""
    path, due = tmp_path / "a.ckpt", []

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            due.append(internals.validates_after_batch(trainer))
            if batch_idx == BATCHES - 1 and trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

        def on_save_checkpoint(self, trainer, module, checkpoint):
            internals.await_validation(checkpoint)

    class Validates(Net):
        def validation_step(self, batch, batch_idx):
            self.seen.append(f"val {self.trainer.current_epoch}")

        val_dataloader = Net.train_dataloader

    def epoch(trainer, module):
        return trainer.current_epoch

    plain_trainer(max_epochs=1, callbacks=[Saves()], num_sanity_val_steps=0).fit(Validates(epoch))
    assert due == [False] * (BATCHES - 1) + [True]
    resumed = Validates(epoch)
    trainer = plain_trainer(max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(resumed, ckpt_path=path, **loading(weights_only=False))
    expected = ["val 0"] * BATCHES + [1] * BATCHES + ["val 1"] * BATCHES
    assert resumed.seen == expected, "Lightning's checkpoints mark a validation that is due in another way"


def test_a_fit_begins_with_another_epoch(plain_trainer):
    module = Net(lambda trainer, module: trainer.current_epoch)
    trainer = plain_trainer(max_epochs=5)
    internals.start_at_epoch(trainer, 4)
    trainer.fit(module)
    assert module.seen == [4] * BATCHES, "`trainer.current_epoch` is not that of the fit loop's epoch progress any more"


@pytest.mark.parametrize("is_automatic", [True, False])
def test_steps_are_added(fit, is_automatic):
    module = Net()
    module.automatic_optimization = is_automatic
    module.look = lambda trainer, module: internals.add_optimizer_steps(trainer, 10)
    trainer, _ = fit(module=module)
    steps = BATCHES if is_automatic else 0
    assert trainer.global_step == 10 * BATCHES + steps, "`trainer.global_step` counts completed steps in another way"
    assert internals.log_position(trainer) == 11 * BATCHES


def test_metrics_are_where_callbacks_look(fit):
    trainer, _ = fit(lambda trainer, module: internals.show_metrics(trainer, {"fed/clients": torch.tensor(2.0)}))
    assert trainer.callback_metrics["fed/clients"] == 2, "`trainer.callback_metrics` is a copy by now"
    assert trainer.logged_metrics["fed/clients"] == 2, "`trainer.logged_metrics` is a copy by now"
    internals.hide_metrics(trainer, ["fed/clients", "unknown"])
    assert not {"fed/clients"} & (trainer.callback_metrics.keys() | trainer.logged_metrics.keys())


def test_the_epoch_loop_ends_where_it_is_known(plain_trainer):
    """After the second batch, by `max_steps` or by `should_stop`, but not before `min_epochs`."""

    class Stops(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 1
            ends.append(internals.ends_after_batch(trainer))

    for options, expected in (
        ({"max_epochs": 2}, [False, True]),
        ({"max_epochs": 1, "min_epochs": 1}, [False] * BATCHES),
        ({"max_epochs": 2, "max_steps": 1}, [True]),
    ):
        ends = []
        plain_trainer(callbacks=[Stops()], **options).fit(Net())
        assert ends == expected, "Lightning leaves its epoch loop after other batches than before"


def test_an_epoch_without_a_length_ends_with_a_batch(plain_trainer):
    """For a loader with a wrong length of ten; Lightning validates after the last batch, as for an iterable."""
    validated = []

    class Stream(Net):
        def train_dataloader(self):
            return Loader()

        def on_train_epoch_start(self):
            internals.forget_length(self.trainer)

        def validation_step(self, batch, batch_idx):
            validated.append((self.trainer.num_training_batches, len(self.seen)))

        def val_dataloader(self):
            return [torch.ones(1, 2)]

    class Loader:
        def __len__(self):
            return 10

        def __iter__(self):
            yield torch.ones(1, 2)
            internals.end_with_batch(trainer)
            yield torch.ones(1, 2)

    trainer = plain_trainer(max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(Stream())
    assert validated == [(float("inf"), 2), (float("inf"), 4)], "Lightning ends an epoch by something else than before"


def test_the_position_can_be_moved(fit):
    trainer, _ = fit(lambda trainer, module: internals.move_log_position(trainer, -1))
    assert internals.log_position(trainer) == 0


def test_the_x_axis_is_where_lightning_logs(plain_trainer):
    class Logs(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("position", float(internals.log_position(self.trainer)), on_step=True, on_epoch=False)

    logger = MemoryLogger()
    trainer = plain_trainer(max_epochs=2, logger=logger, log_every_n_steps=1)
    trainer.fit(Logs())
    assert len(logger.lines) == 2 * BATCHES
    assert all(step == line["position"] for step, line in logger.lines), (
        "Lightning does not log at `_batches_that_stepped` of the epoch loop any more"
    )


def test_only_the_schedulers_that_are_kept_step(fit):
    trainer, _ = fit(lambda trainer, module: internals.keep_schedulers(trainer, []))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1, (
        "Lightning does not ask the strategy for `lr_scheduler_configs` at every step any more"
    )


def test_a_loss_scale_has_a_state_under_the_plugins_name(plain_trainer, tmp_path):
    plain = plain_trainer(max_epochs=1)
    assert internals.loss_scaler(plain) is None, "a precision plugin without a loss scale has a state by now"

    class Scales(L.pytorch.plugins.Precision):
        def state_dict(self):
            return {"scale": 2.0}

        def load_state_dict(self, state_dict):
            pass

    trainer = plain_trainer(max_epochs=1, plugins=[Scales()])
    trainer.fit(Net())
    assert internals.loss_scaler(trainer) is trainer.precision_plugin
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert checkpoint[internals.loss_scaler_key(trainer)] == {"scale": 2.0}, (
        "checkpoints hold the precision plugin's state under another name than its class's"
    )


@pytest.mark.parametrize(("fused", "factor"), [(False, 1.0), (True, 8.0)])
def test_gradients_are_scaled_where_the_optimizer_unscales_them(fused, factor):
    """A gradient of 1, scaled by 8, moves the parameter by the learning rate; the optimizer sees 1 or 8."""
    parameter, scaler = nn.Parameter(torch.zeros(1)), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=fused)
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler))
    scaler.scale(parameter.sum()).backward()
    if internals.gradient_scale(trainer, optimizer) == 1:
        scaler.unscale_(optimizer)  # as Lightning's plugin does before its hook, except for such optimizers
    assert parameter.grad.item() == internals.gradient_scale(trainer, optimizer) == factor
    scaler.step(optimizer)
    assert parameter.item() == -0.5, "fused optimizers do not say any more that they unscale gradients"
    assert internals.gradient_scale(SimpleNamespace(precision_plugin=SimpleNamespace()), optimizer) == 1


@pytest.mark.parametrize(("value", "is_left_out"), [(1.0, False), (float("inf"), True)])
def test_a_step_of_gradients_that_overflow(value, is_left_out):
    parameter = torch.nn.Parameter(torch.zeros(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler))
    assert internals.loss_scale(trainer) == 64
    scaler.scale((value * parameter).sum()).backward()
    scaler.unscale_(optimizer)
    assert internals.is_step_left_out(trainer, optimizer) == is_left_out
    scaler.step(optimizer)
    assert (parameter.item() == 0) == is_left_out, "the scaler leaves out other steps"
    without = SimpleNamespace(precision_plugin=SimpleNamespace())
    assert internals.loss_scale(without) == 1
    assert not internals.is_step_left_out(without, optimizer)


def test_modules_that_are_compiled():
    layer = nn.Linear(1, 1)
    assert not internals.is_compiled(nn.Sequential(layer))
    assert internals.is_compiled(nn.Sequential(torch.compile(layer, backend="eager"))), "torch.compile leaves no name"
    layer.compile(backend="eager")
    assert internals.is_compiled(layer), "Module.compile leaves no name"


def test_the_batch_size_that_lightning_would_find():
    batch = {"image": torch.zeros(4, 3), "mask": torch.zeros(4)}
    assert internals.batch_size_of(batch) == 4, "Lightning finds the batch size of a logged value in another way"


def test_the_attributes_that_every_module_of_lightnings_has(fit):
    names = internals.lightning_attributes()
    assert "layer" not in names
    assert "training" not in names
    _, module = fit()
    users = {"layer", "look", "seen"}
    on_demand = {"_hparams"}  # not requested in a visit before
    others = vars(module).keys() - names - users - on_demand - vars(nn.Module()).keys()
    assert not others, f"Lightning gives a module attributes in a fit that an empty one has not: {others}"


def test_callbacks_can_log_from_setup_on(fit):
    class Looks(L.Callback):
        def setup(self, trainer, module, stage):
            self.found = internals.callbacks_with_log(trainer)

    looks = Looks()
    fit(callbacks=[looks])
    assert looks in looks.found, "Lightning does not give the module's `log` to every callback before `setup` any more"


def test_writing_in_place_counts_a_tensors_version():
    tensor = torch.zeros(2)
    before = internals.tensor_version(tensor)
    tensor.add_(1)
    assert internals.tensor_version(tensor) > before, "torch does not count writes in `_version` any more"


def test_a_tensor_of_vmap_is_told_apart():
    kept = SimpleNamespace()

    def keeps(tensor):
        kept.tensor = tensor
        return tensor

    vmap(keeps)(torch.zeros(2, 3))
    assert internals.is_vmap_tensor(kept.tensor), "torch does not say any more whether a tensor is one of `vmap`'s"
    assert not internals.is_vmap_tensor(torch.zeros(2))


def test_hooks_of_gradients_are_seen():
    parameter = nn.Parameter(torch.zeros(2))
    assert not internals.has_gradient_hooks(parameter)
    parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    assert internals.has_gradient_hooks(parameter), "torch keeps hooks of accumulated gradients elsewhere by now"


def test_callbacks_are_found_by_class(plain_trainer):
    first, second = ModelCheckpoint(), ModelCheckpoint(monitor="val_loss")
    trainer = plain_trainer(callbacks=[first, LearningRateMonitor(), second], enable_checkpointing=True, logger=True)
    assert internals.find_callbacks(trainer, ModelCheckpoint) == [first, second]


def test_hooks_of_a_class_and_of_an_object_count():
    class Overrides(L.LightningModule):
        def on_train_batch_end(self, *arguments):
            pass

    module = L.LightningModule()
    assert internals.implements(Overrides(), "on_train_batch_end", L.LightningModule)
    assert not internals.implements(module, "on_train_batch_end", L.LightningModule)
    module.on_train_batch_end = print
    assert internals.implements(module, "on_train_batch_end", L.LightningModule)


@pytest.mark.parametrize(("fn", "expected"), [("fit", ["averaging"]), ("validate", [])])
def test_a_status_is_shown_in_a_fit_only(fn, expected):
    shown = []
    bar = SimpleNamespace(show_status=shown.append)
    trainer = SimpleNamespace(progress_bar_callback=bar, state=SimpleNamespace(fn=fn))
    internals.show_status(trainer, "averaging")
    trainer.progress_bar_callback = None
    internals.show_status(trainer, "averaging")
    assert shown == expected


def test_every_function_has_a_test():
    """Searches this file for each function name."""
    with open(__file__, encoding="utf-8") as file:
        source = file.read()
    names = [name for name, value in vars(internals).items() if getattr(value, "__module__", "") == internals.__name__]
    missing = [name for name in names if not name.startswith("_") and f"internals.{name}(" not in source]
    assert not missing


def test_a_call_of_log_has_lightnings_arguments():
    given = inspect.signature(L.LightningModule.log).parameters
    defaults = {name: parameter.default for name, parameter in list(given.items())[3:]}
    fields = dataclasses.fields(LogCall)
    assert {field.name: field.default for field in fields[2:]} == defaults, "`LightningModule.log` has other arguments"
    assert [field.name for field in fields] == list(given)[1:], "`LightningModule.log` has another order of arguments"


def test_a_loader_is_distributed_over_processes(plain_trainer):
    loader = internals.distribute_loader(plain_trainer(devices=2, strategy="ddp"), DataLoader(torch.arange(6.0), 1))
    assert len(set(map(float, loader))) == 3, "Lightning distributes the examples in another way"


def test_exchange_max_steps(plain_trainer):
    trainer = plain_trainer(max_epochs=5, max_steps=3)
    assert internals.exchange_max_steps(trainer, 4) == 3
    loader = DataLoader(TensorDataset(*models.vectors({"a": 40})["a"]), 16)
    trainer.fit(models.Module(models.mlp()), loader, loader)
    assert (trainer.max_steps, trainer.global_step) == (4, 4)
