"""Invariant 3: a run interrupted at any point and resumed equals an uninterrupted run.

`resume_script.py` defines the runs.
"""

import json
import os
import shutil
import signal
from collections import Counter
from datetime import timedelta
from inspect import signature

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, Timer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_fed import FederatedTrainer
from lightning_fed.data import IID
from tests import warm_process
from tests.breadth import quick
from tests.recorders import SavesOnException, loading
from tests.resume_script import RUNS, At, Interruption, fit, last_checkpoint, prepare, rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Final weights, logged rows and client states of uninterrupted runs, by name."""
    done = {}

    def get(run):
        if run not in done:
            folder = tmp_path_factory.mktemp(run)
            trainer = fit(run, folder, "whole")
            done[run] = trainer.lightning_module.state_dict(), rows(folder, "whole"), kept(trainer)
        return done[run]

    return get


def kept(trainer):
    federation = trainer.callbacks[0]
    return {client: federation.store.get(client) or {} for client in federation.population.clients}


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, state[name]), name


def assert_ends_alike(trainer, expected, folder, *versions, since=0):
    """Weights, client states and the combined logs equal the uninterrupted run."""
    weights, logged, of_clients = expected
    assert_same(trainer.lightning_module.state_dict(), weights)
    for client, state in kept(trainer).items():
        assert_same(state, of_clients[client])
    parts = together(folder, *versions)
    for round in range(since, len(logged)):
        assert parts.get(round) == logged[round]
    assert set(parts) <= set(logged)


def together(folder, *versions):
    parts = {}
    for version in versions:
        for round, values in rows(folder, version).items():
            parts.setdefault(round, {}).update(values)
    return parts


def interrupt(trainer, module):
    raise Interruption


def break_off(run, folder, version, *callbacks, **options):
    trainer, module, data = prepare(run, folder, version, callbacks, **options)
    with pytest.raises(Interruption):
        trainer.fit(module, datamodule=data)
    return trainer


# ---------------------------------------------------------------------------------------------------------------------
# Killed
# ---------------------------------------------------------------------------------------------------------------------

KILLS = {
    "personal-in-memory": ("on_train_batch_start", 2, "second visit"),
    "personal-in-folder": ("on_before_optimizer_step", 2, "middle"),
    "schedulers": ("on_before_optimizer_step", 2, "last"),
    "batch-norm-average": ("on_train_batch_end", 1, "last"),
    "personal-batch-norm-in-folder": ("on_train_batch_end", 3, "last"),
    "saved-after-validation": ("on_validation_batch_end", 2, "last"),
    "margins-in-memory": ("on_before_optimizer_step", 3, "middle"),
    "margins-in-folder": ("on_validation_batch_end", 1, "last"),
    "centers": ("on_before_optimizer_step", 2, "middle"),
    "corrected-gradients": ("on_validation_batch_end", 1, "last"),
    "control-variates": ("on_before_optimizer_step", 2, "middle"),
    "own-models": ("on_before_optimizer_step", 2, "middle"),
    "server-momentum": ("on_before_optimizer_step", 2, "middle"),
    "server-moments": ("on_train_batch_end", 3, "last"),
    "partition": ("on_train_batch_start", 1, "first"),
    "federated-trainer": ("on_before_optimizer_step", 2, "middle"),
}


@pytest.fixture(scope="module")
def killed(request, tmp_path_factory):
    """Folders of the killed runs needed in this session."""
    root = tmp_path_factory.mktemp("killed")
    tests = [item for item in request.session.items if "killed" in item.fixturenames and hasattr(item, "callspec")]
    folders = {item.callspec.params["run"]: root / item.callspec.params["run"] for item in tests}
    for folder in folders.values():
        folder.mkdir()
    jobs = [{"run": run, "folder": str(folders[run]), "version": "killed", "at": KILLS[run]} for run in folders]
    (root / "jobs.json").write_text(json.dumps(jobs))
    warm_process.run("tests.resume_script", root / "jobs.json")
    return folders


@pytest.mark.parametrize("run", quick(KILLS, ["personal-in-folder"]))
def test_killed_with_sigkill_and_resumed_in_another_process(run, killed, whole):
    folder = killed[run]
    hook, round, _ = KILLS[run]
    has_aggregated = hook == "on_validation_batch_end"  # then the round's row has been written
    assert (folder / "killed").exists()
    assert set(rows(folder, "killed")) == set(range(round + has_aggregated)), "it was not killed where it should be"
    trainer = fit(run, folder, "resumed", ckpt_path=last_checkpoint(folder))
    assert_ends_alike(trainer, whole(run), folder, "killed", "resumed")


# Other runs store the same state in the same place, or are interrupted in the tests below or of their methods.
CHOSEN = ("compressed-down", "margins-in-memory", "control-variates", "in-order-of-arrival", "partition")


@pytest.mark.parametrize(
    ("run", "where"),
    quick(
        [(run, where) for run in RUNS for where in ("second visit", "last")],
        [(run, "second visit" if place % 2 else "last") for place, run in enumerate(RUNS) if run in CHOSEN],
    ),
)
def test_resumes_from_the_last_checkpoint(run, where, whole, tmp_path):
    break_off(run, tmp_path, "a", At("on_train_batch_start", 1, where, interrupt))
    trainer = fit(run, tmp_path, "b", ckpt_path=last_checkpoint(tmp_path))
    assert_ends_alike(trainer, whole(run), tmp_path, "a", "b")


@pytest.mark.parametrize(
    "hook",
    quick(
        ["on_validation_start", "on_validation_end", "on_train_epoch_end"],
        ["on_validation_start", "on_train_epoch_end"],
    ),
)
@pytest.mark.parametrize("run", quick(["personal-in-folder", "saved-after-validation"], ["saved-after-validation"]))
def test_resumes_after_a_break_between_rounds(run, hook, whole, tmp_path):
    break_off(run, tmp_path, "a", At(hook, 2, "last", interrupt))
    trainer = fit(run, tmp_path, "b", ckpt_path=last_checkpoint(tmp_path))
    if (run, hook) == ("saved-after-validation", "on_train_epoch_end"):
        # The checkpoint of round 2 is written, the row is not: Lightning writes rows at the end of the epoch.
        assert_same(trainer.lightning_module.state_dict(), whole(run)[0])
        assert rows(tmp_path, "b")[3] == whole(run)[1][3]
    else:
        assert_ends_alike(trainer, whole(run), tmp_path, "a", "b")


@pytest.mark.parametrize("run", quick(["schedulers", "personal-in-folder"], ["schedulers"]))
def test_goes_on_after_the_end(run, whole, tmp_path):
    fit(run, tmp_path, "a", max_epochs=2)
    trainer = fit(run, tmp_path, "b", ckpt_path=last_checkpoint(tmp_path))
    assert_ends_alike(trainer, whole(run), tmp_path, "a", "b")


@pytest.mark.parametrize("run", quick(["personal-in-memory", "personal-in-folder"], ["personal-in-folder"]))
def test_resumes_from_the_checkpoint_before_the_last(run, whole, tmp_path):
    """Required if the process is killed while writing the newest checkpoint."""

    def put_aside(trainer, module):
        shutil.copy(last_checkpoint(tmp_path), tmp_path / "before.ckpt")

    callbacks = (At("on_train_batch_start", 2, "first", put_aside), At("on_train_batch_start", 3, "middle", interrupt))
    break_off(run, tmp_path, "a", *callbacks)
    trainer = fit(run, tmp_path, "b", ckpt_path=tmp_path / "before.ckpt")
    assert_ends_alike(trainer, whole(run), tmp_path, "a", "b")


@pytest.mark.parametrize(
    "run",
    quick(
        ["personal-in-memory", "personal-in-folder", "schedulers", "saved-after-validation"],
        ["personal-in-folder"],
    ),
)
def test_broken_off_again_and_again(run, whole, tmp_path):
    breaks = {"a": (1, "first"), "b": (1, "second visit"), "c": (2, "last")}

    def every_step():
        return ModelCheckpoint(tmp_path / "steps", every_n_train_steps=1, save_last=True, save_top_k=0)

    checkpoint = None
    for version, (round, where) in breaks.items():
        callbacks = [every_step(), At("on_train_batch_start", round, where, interrupt)]
        trainer, module, data = prepare(run, tmp_path, version, callbacks)
        with pytest.raises(Interruption):
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        checkpoint = last_checkpoint(tmp_path, "steps")
    trainer = fit(run, tmp_path, "d", [every_step()], ckpt_path=checkpoint)
    assert_ends_alike(trainer, whole(run), tmp_path, *breaks, "d")


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints inside a round
# ---------------------------------------------------------------------------------------------------------------------


class Saves(L.Callback):
    """Saves a checkpoint in every hook for every batch in a round, and copies the client folder."""

    HOOKS = (
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_validation_batch_end",
    )

    def __init__(self, folder, round):
        self.folder = folder
        self.round = round
        self.batch = -1
        self.before = self.after = None
        self.saved = []

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.round - 1:
            self.before = copied(pl_module)
        if trainer.current_epoch == self.round:
            self.after = copied(pl_module)

    def save(self, hook, trainer):
        if trainer.current_epoch != self.round:
            return
        self.batch += hook == "on_train_batch_start"
        path = self.folder / f"{hook}-{self.batch}"
        if path.exists():  # at a later validation batch
            return
        trainer.save_checkpoint(path / "full.ckpt")
        trainer.save_checkpoint(path / "weights.ckpt", **loading(weights_only=True))
        if (self.folder / "clients").exists():
            shutil.copytree(self.folder / "clients", path / "clients", dirs_exist_ok=True)
        self.saved.append((hook, self.batch, trainer.num_training_batches, path, trainer.global_step))


def _saving(name):
    return lambda self, trainer, *arguments: self.save(name, trainer)


for _name in Saves.HOOKS:
    setattr(Saves, _name, _saving(_name))


INSIDE_A_ROUND = ("personal-in-folder",)


def copied(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("run", quick(RUNS, INSIDE_A_ROUND))
def test_a_checkpoint_inside_a_round(run, whole, tmp_path):
    saves = Saves(tmp_path, 2)
    trainer = fit(run, tmp_path, "a", [saves])
    assert_same(trainer.lightning_module.state_dict(), whole(run)[0])  # saving does not change the run
    count = saves.saved[0][2]
    chosen = {
        ("on_train_batch_end", count - 2),
        ("on_train_batch_end", count - 1),
        ("on_validation_batch_end", count - 1),
    }
    chosen |= {("on_before_optimizer_step", batch) for batch in (0, count - 1)}
    assert len(saves.saved) >= count * 3
    for hook, batch, _, path, _ in saves.saved:
        is_complete = hook == "on_validation_batch_end"  # the round ends after the last callback hook
        for name in ("full.ckpt", "weights.ckpt"):
            checkpoint = torch.load(path / name, weights_only=True)
            assert_same(checkpoint["state_dict"], saves.after if is_complete else saves.before)
        if (hook, batch) not in chosen:
            continue
        if (path / "clients").exists():
            shutil.rmtree(tmp_path / "clients")
            shutil.copytree(path / "clients", tmp_path / "clients")
        resumed = fit(run, tmp_path, path.name, ckpt_path=path / "full.ckpt")
        assert resumed.global_step == trainer.global_step
        # Lightning does not repeat the validation of an epoch with a finished last batch.
        assert_ends_alike(resumed, whole(run), tmp_path, path.name, since=3 if is_complete else 2)


def test_the_loss_scale_of_a_checkpoint_inside_a_round(whole, tmp_path):
    """The round's scale, not the current client's scale."""

    def plugins():
        # As `precision="16-mixed"` on an accelerator; the scale doubles with every batch.
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        return [MixedPrecision("16-mixed", "cpu", scaler=scaler)]

    run = "batch-norm-average"
    expected = fit(run, tmp_path, "whole", plugins=plugins())
    scales = []

    def look(trainer, module):
        scales.append(trainer.precision_plugin.scaler.get_scale())

    def save(trainer, module):
        trainer.save_checkpoint(tmp_path / "inside.ckpt")
        look(trainer, module)

    break_off(
        run,
        tmp_path,
        "a",
        At(
            "on_train_batch_start",
            2,
            "first",
            lambda trainer, _: scales.append(trainer.precision_plugin.scaler.get_scale()),
        ),
        At("on_train_batch_end", 2, "middle", save),
        At("on_before_optimizer_step", 2, "last", interrupt),
        plugins=plugins(),
    )
    assert scales[0] != scales[1]
    assert torch.load(tmp_path / "inside.ckpt", weights_only=True)["MixedPrecision"]["scale"] == scales[0]
    trainer = fit(run, tmp_path, "b", ckpt_path=tmp_path / "inside.ckpt", plugins=plugins())
    assert trainer.precision_plugin.scaler.get_scale() == expected.precision_plugin.scaler.get_scale()
    assert_same(trainer.lightning_module.state_dict(), expected.lightning_module.state_dict())


# ---------------------------------------------------------------------------------------------------------------------
# Other ends inside a round
# ---------------------------------------------------------------------------------------------------------------------


class Globals(L.Callback):
    """Records the global models after every round, and the validated models."""

    def __init__(self):
        self.after = []
        self.steps = []
        self.validated = []

    def on_validation_start(self, trainer, pl_module):
        self.validated.append(copied(pl_module))

    def on_train_epoch_end(self, trainer, pl_module):
        self.after.append(copied(pl_module))
        self.steps.append(trainer.global_step)


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    done = {}

    def get(run):
        if run not in done:
            done[run] = Globals()
            fit(run, tmp_path_factory.mktemp(run), "whole", [done[run]])
        return done[run]

    return get


class Trouble(Exception):
    pass


def raise_trouble(*arguments):
    raise Trouble


def raise_in_step(trainer, module):
    module.training_step = raise_trouble


def press_ctrl_c(trainer, module):
    raise KeyboardInterrupt


def be_terminated(trainer, module):
    os.kill(os.getpid(), signal.SIGTERM)


RAISED = {
    "callback": (interrupt, Interruption),
    "training step": (raise_in_step, Trouble),
    "ctrl-c": (press_ctrl_c, SystemExit),
    "sigterm": (be_terminated, SIGTERMException),
}


def assert_given_back(module, data):
    for owner, name in ((module, "on_save_checkpoint"), (module, "on_train_batch_end"), (data, "train_dataloader")):
        assert name not in vars(owner)


@pytest.mark.filterwarnings("ignore:`?.fit.ckpt_path=")  # Lightning's warning for every `OnExceptionCheckpoint`
@pytest.mark.parametrize("run", quick(["personal-in-folder", "schedulers"], ["personal-in-folder"]))
@pytest.mark.parametrize(
    ("how", "where"),
    quick(
        [(how, where) for how in RAISED for where in ("first", "second visit", "last")],
        [("callback", "last"), ("sigterm", "last")],  # other exceptions: below, and in test_doors.py
    ),
)
def test_an_exception_leaves_the_last_global_model(run, how, where, whole, rounds, tmp_path):
    """In the module and in checkpoints saved on the exception; the resumed run is exact."""
    action, expected = RAISED[how]
    hook = "on_before_optimizer_step" if (how, where) == ("callback", "last") else "on_train_batch_start"
    callbacks = [At(hook, 1, where, action), OnExceptionCheckpoint(tmp_path / "after")]
    trainer, module, data = prepare(run, tmp_path, "a", callbacks)
    trainer.callbacks.insert(0, SavesOnException(tmp_path / "before" / "on_exception.ckpt"))
    with pytest.raises(expected):
        trainer.fit(module, datamodule=data)
    # Lightning handles a signal after the batch: for the last batch after the round, during validation.
    is_complete = (how, where) == ("sigterm", "last")
    assert_same(module.state_dict(), rounds(run).after[1 if is_complete else 0])
    assert_given_back(module, data)
    paths = {name: tmp_path / name / "on_exception.ckpt" for name in ("before", "after")}
    for path in paths.values():
        assert_same(torch.load(path, weights_only=True)["state_dict"], module.state_dict())
    name = "after" if how == "callback" else "before"
    resumed = fit(run, tmp_path, "b", ckpt_path=paths[name])
    assert resumed.global_step == rounds(run).steps[-1]
    # Lightning does not log the rest of an interrupted validation.
    assert_ends_alike(resumed, whole(run), tmp_path, "a", "b", since=2 if is_complete else 0)


@pytest.mark.skipif("save_on_exception" not in signature(ModelCheckpoint).parameters, reason="Lightning 2.6 brings it")
def test_model_checkpoint_on_exception(whole, rounds, tmp_path):
    run = "personal-in-folder"
    options = {"every_n_train_steps": 10_000, "save_last": True, "save_on_exception": True}
    saver = ModelCheckpoint(tmp_path / "exception", "inside", **options)
    with pytest.raises(Trouble):
        fit(run, tmp_path, "a", [saver, At("on_train_batch_start", 2, "middle", raise_in_step)])
    path = last_checkpoint(tmp_path, "exception")
    assert_same(torch.load(path, weights_only=True)["state_dict"], rounds(run).after[1])
    resumed = fit(run, tmp_path, "b", [saver], ckpt_path=path)
    assert_ends_alike(resumed, whole(run), tmp_path, "a", "b")


def stop(trainer, module):
    trainer.should_stop = True


def run_out_of_time(trainer, module):
    timer = next(callback for callback in trainer.callbacks if isinstance(callback, Timer))
    timer.time_elapsed = lambda *arguments: 1e6


def skip_the_rest(trainer, module):
    module.on_train_batch_start = lambda batch, batch_idx: -1


ENDS = {
    "should_stop": (stop, {}),
    "max_time": (run_out_of_time, {"max_time": timedelta(hours=1)}),
}


@pytest.mark.parametrize(
    ("run", "how"),
    quick(
        [(run, how) for run in ("personal-in-memory", "batch-norm-average") for how in ENDS],
        [("personal-in-memory", "should_stop")],
    ),
)
def test_a_fit_that_ends_inside_a_round(run, how, rounds, tmp_path, caplog):
    """Module, checkpoints and validation use the global model of the trained part."""
    action, options = ENDS[how]
    globals_ = Globals()
    trainer, module, data = prepare(
        run, tmp_path, "a", [At("on_train_batch_end", 2, "first", action), globals_], **options
    )
    trainer.fit(module, datamodule=data)
    assert trainer.global_step < rounds(run).steps[2]
    assert_same(globals_.after[1], rounds(run).after[1])
    assert any(not torch.equal(value, globals_.after[1][name]) for name, value in globals_.after[2].items())
    assert_same(module.state_dict(), globals_.after[2])
    assert_same(torch.load(last_checkpoint(tmp_path), weights_only=True)["state_dict"], globals_.after[2])
    for validated, after in zip(globals_.validated, globals_.after, strict=False):
        assert_same(validated, after)
    assert "Round 3 was cut short" in caplog.text
    assert_given_back(module, data)


@pytest.mark.parametrize("run", quick(["personal-in-memory", "personal-in-folder"], ["personal-in-folder"]))
def test_a_visit_that_the_module_ends_counts(run, rounds, tmp_path):
    """`on_train_batch_start` may return -1 to end the visit of one client, which sends the trained part."""

    def cut(module):
        batches = Counter()  # by round: `index` counts within a visit

        def on_train_batch_start(batch, index):
            batches[module.current_epoch] += 1
            return -1 if module.current_epoch == 1 and batches[1] == 6 else None

        module.on_train_batch_start = on_train_batch_start

    def train(version, callbacks=(), ckpt_path=None):
        trainer, module, data = prepare(run, folder, version, callbacks)
        cut(module)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        except Interruption:
            assert callbacks
        return trainer

    folder = tmp_path / "whole"
    globals_ = Globals()
    expected = train("whole", [globals_])
    assert_same(globals_.after[0], rounds(run).after[0])
    whole = rounds(run).after[1]
    assert any(not torch.equal(globals_.after[1][name], value) for name, value in whole.items())
    logged, of_clients = rows(folder, "whole"), kept(expected)
    assert logged[1]["fed/clients"] == logged[0]["fed/clients"]

    folder = tmp_path / "parts"
    saver = ModelCheckpoint(folder / "steps", every_n_train_steps=1, save_last=True, save_top_k=0)
    train("a", [saver, At("on_before_optimizer_step", 2, "middle", interrupt)])
    trainer = train("b", [saver], last_checkpoint(folder, "steps"))
    assert_ends_alike(trainer, (expected.lightning_module.state_dict(), logged, of_clients), folder, "a", "b")


def test_the_module_and_its_data_train_elsewhere_after_an_exception(tmp_path):
    trainer, module, data = prepare("partition", tmp_path, "a", [At("on_train_batch_start", 0, "middle", interrupt)])
    with pytest.raises(Interruption):
        trainer.fit(module, datamodule=data)
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    plain = L.Trainer(max_epochs=1, enable_checkpointing=False, **quiet)
    plain.fit(module, datamodule=data)
    assert plain.num_training_batches == 12  # 60 examples in batches of 5, not a round of clients
    federated = FederatedTrainer(max_rounds=1, partition=IID(3), enable_checkpointing=False, **quiet)
    federated.fit(module, datamodule=data)
    assert federated.callback_metrics["fed/clients"] == 3
