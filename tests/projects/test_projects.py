"""Realistic projects, plain and federated with a few changed lines: the first attempt works and is correct."""

import importlib.util
import logging
import os
import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import pytest
import torch

import lightning_fed
from lightning_fed.backends import fused as fused_visits
from tests.breadth import quick
from tests.conftest import QUIET
from tests.projects.changes import MOST_LINES, changed_lines, federate, with_callback, with_trainer
from tests.recorders import FixedBatches, MemoryLogger, Recorder, assert_same, state_of
from tests.references import average_reference, visit_seed_reference

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*Consider setting `persistent_workers=True`"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),  # 5.23 warns about its own attributes
]

FOLDER = Path(__file__).parent / "scripts"

# Changed lines besides the import.
DIFFS = {
    ("cli", "trainer"): """
     "--trainer.max_epochs=3",
+    "--trainer.partition=lightning_fed.data.IID", "--trainer.partition.num_clients=3",
         Digits,
+        trainer_class=fed.FederatedTrainer,
""",
    ("cli", "callback"): """
     "--trainer.max_epochs=3",
+    "--trainer.callbacks+=lightning_fed.Federation", "--trainer.callbacks.partition=lightning_fed.data.IID",
+    "--trainer.callbacks.partition.num_clients=3",
""",
    ("hydra_template", "trainer"): """
-  _target_: lightning.pytorch.trainer.Trainer
+  _target_: lightning_fed.FederatedTrainer
+  partition: {_target_: lightning_fed.data.IID, num_clients: 3}
""",
    ("hydra_template", "callback"): """
     patience: 100
+  federation: {_target_: lightning_fed.Federation, partition: {_target_: lightning_fed.data.IID, num_clients: 3}}
""",
    ("gan", "trainer"): with_trainer(6, "partition=fed.data.IID(3)"),
    ("gan", "callback"): with_callback("    L.seed_everything(0)", "partition=fed.data.IID(3)"),
    ("moco", "trainer"): with_trainer(4, "partition=fed.data.Dirichlet(3, 1.0)"),
    ("moco", "callback"): with_callback("    L.seed_everything(1)", "partition=fed.data.Dirichlet(3, 1.0)"),
    ("segmentation", "trainer"): """
-    trainer = L.Trainer(max_epochs=EPOCHS, log_every_n_steps=1, callbacks=callbacks, **options)
+    trainer = fed.FederatedTrainer(
+        max_rounds=EPOCHS, partition=fed.data.IID(3), log_every_n_steps=1, callbacks=callbacks, **options)
""",
    ("segmentation", "callback"): with_callback("    L.seed_everything(1)", "partition=fed.data.IID(3)"),
    ("text", "trainer"): """
-            num_training_steps=self.trainer.estimated_stepping_batches,
+            num_training_steps=fed.scheduler_steps(self.trainer),
-    trainer = L.Trainer(max_epochs=3, callbacks=callbacks, **options)
+    trainer = fed.FederatedTrainer(max_rounds=3, partition=fed.data.Dirichlet(3, 5.0), callbacks=callbacks, **options)
""",
    ("text", "callback"): """
-            num_training_steps=self.trainer.estimated_stepping_batches,
+            num_training_steps=fed.scheduler_steps(self.trainer),
     L.seed_everything(42)
+    callbacks = [*callbacks, fed.Federation(partition=fed.data.Dirichlet(3, 5.0))]
""",
    ("lora", "trainer"): """
-    trainer = L.Trainer(max_epochs=3, gradient_clip_val=1.0, callbacks=callbacks, **options)
+    trainer = fed.FederatedTrainer(
+        max_rounds=3, partition=fed.data.IID(3), gradient_clip_val=1.0, callbacks=callbacks, **options)
""",
    ("lora", "callback"): with_callback("    L.seed_everything(1)", "partition=fed.data.IID(3)"),
    ("forecasting", "trainer"): """
-    trainer = pl.Trainer(
+    trainer = fed.FederatedTrainer(
+        partition=fed.data.ByGroup(lambda sample: f"region {sample[0]['groups'].item() % 3}"),
""",
    ("forecasting", "callback"): """
     pl.seed_everything(42)
+    regions = fed.data.ByGroup(lambda sample: f"region {sample[0]['groups'].item() % 3}")
+    callbacks = [*callbacks, fed.Federation(partition=regions)]
""",
    ("graphs", "trainer"): with_trainer(3, "partition=fed.data.Dirichlet(3, 10)"),
    ("graphs", "callback"): with_callback("    L.seed_everything(12)", "partition=fed.data.Dirichlet(3, 10)"),
    ("diffusion", "trainer"): """
-    trainer = L.Trainer(max_epochs=4, gradient_clip_val=1.0, callbacks=callbacks, **options)
+    trainer = fed.FederatedTrainer(
+        max_rounds=4, partition=fed.data.IID(3), gradient_clip_val=1.0, callbacks=callbacks, **options)
""",
    ("diffusion", "callback"): with_callback("    L.seed_everything(3)", "partition=fed.data.IID(3)"),
    ("uncertainty", "trainer"): with_trainer(5, "partition=fed.data.Dirichlet(3, 5.0)"),
    ("uncertainty", "callback"): with_callback("    L.seed_everything(0)", "partition=fed.data.Dirichlet(3, 5.0)"),
    ("anomaly", "trainer"): """
-        self.trainer = pl.Trainer(callbacks=callbacks, **kwargs)
+        self.trainer = fed.FederatedTrainer(partition=fed.data.IID(3), callbacks=callbacks, **kwargs)
""",
    ("anomaly", "callback"): with_callback("    pl.seed_everything(5)", "partition=fed.data.IID(3)"),
    ("transfer", "trainer"): """
-    trainer = L.Trainer(max_epochs=4, callbacks=[finetuning, *callbacks], **options)
+    callbacks = [finetuning, *callbacks]
+    trainer = fed.FederatedTrainer(max_rounds=4, partition=fed.data.IID(3), callbacks=callbacks, **options)
""",
    ("transfer", "callback"): with_callback("    L.seed_everything(1)", "partition=fed.data.IID(3)"),
    ("landcover", "trainer"): """
-    train = DataLoader(dataset, batch_size=8, sampler=RandomGeoSampler(dataset, 16, 48))
+    train = {n: DataLoader(dataset, 8, sampler=RandomGeoSampler(dataset, 16, 24, (n, n + 32))) for n in (0, 32)}
-    trainer = L.Trainer(max_epochs=3, callbacks=callbacks, **options)
+    trainer = fed.FederatedTrainer(max_rounds=3, callbacks=callbacks, **options)
""",
    ("landcover", "callback"): """
     L.seed_everything(0)
+    callbacks = [*callbacks, fed.Federation()]
-    trainer.fit(SemanticSegmentationTask(), train, val)
+    regions = {n: DataLoader(dataset, 8, sampler=RandomGeoSampler(dataset, 16, 24, (n, n + 32))) for n in (0, 32)}
+    trainer.fit(SemanticSegmentationTask(), regions, val)
""",
    ("distillation", "trainer"): with_trainer(4, "partition=fed.data.IID(3)"),
    ("distillation", "callback"): with_callback("    L.seed_everything(2)", "partition=fed.data.IID(3)"),
    ("metric_learning", "trainer"): with_trainer(4, "partition=fed.data.Dirichlet(3, 1.0)"),
    ("metric_learning", "callback"): with_callback("    L.seed_everything(4)", "partition=fed.data.Dirichlet(3, 1.0)"),
    ("few_shot", "trainer"): """
-    train = episodes(Glyphs(range(8)), 24)
+    train = [episodes(Glyphs(range(4)), 12), episodes(Glyphs(range(4, 8)), 12)]
-    trainer = L.Trainer(max_epochs=4, callbacks=callbacks, **options)
+    trainer = fed.FederatedTrainer(max_rounds=4, callbacks=callbacks, **options)
""",
    ("few_shot", "callback"): with_callback("    L.seed_everything(6)", "",
        "-    train = episodes(Glyphs(range(8)), 24)",
        "+    train = [episodes(Glyphs(range(4)), 12), episodes(Glyphs(range(4, 8)), 12)]",
    ),
    ("dqn", "trainer"): """
-    train = DataLoader(ReplayStream(), batch_size=16)
+    train = [DataLoader(ReplayStream(start), batch_size=16) for start in (1, 3)]
-    trainer = L.Trainer(max_epochs=4, limit_train_batches=30, callbacks=callbacks, **options)
+    trainer = fed.FederatedTrainer(max_rounds=4, local_steps=30, callbacks=callbacks, **options)
""",
    ("dqn", "callback"): """
-    train = DataLoader(ReplayStream(), batch_size=16)
+    train = [DataLoader(ReplayStream(start), batch_size=16) for start in (1, 3)]
-    trainer = L.Trainer(max_epochs=4, limit_train_batches=30, callbacks=callbacks, **options)
+    trainer = L.Trainer(max_epochs=4, callbacks=[*callbacks, fed.Federation(local_steps=30)], **options)
""",
    ("csv_plot", "trainer"): """
-    trainer = L.Trainer(max_epochs=4, logger=[csv_logger, logger], callbacks=callbacks, **options)
+    trainer = fed.FederatedTrainer(
+        max_rounds=4, partition=fed.data.IID(3), logger=[csv_logger, logger], callbacks=callbacks, **options)
""",
    ("csv_plot", "callback"): with_callback("    L.seed_everything(9)", "partition=fed.data.IID(3)"),
    ("table", "trainer"): with_trainer(4, "partition=fed.data.IID(3)"),
    ("table", "callback"): with_callback("    L.seed_everything(10)", "partition=fed.data.IID(3)"),
    ("clustering", "trainer"): with_trainer(4, "partition=fed.data.IID(3)"),
    ("clustering", "callback"): with_callback("    L.seed_everything(11)", "partition=fed.data.IID(3)"),
    ("barlow_twins", "trainer"): with_trainer(4, "partition=fed.data.IID(2)"),
    ("barlow_twins", "callback"): """
-    callbacks = [OnlineFineTuner(16, 3), *callbacks]
+    callbacks = [OnlineFineTuner(16, 3), *callbacks, fed.Federation(partition=fed.data.IID(2))]
""",
    ("point_cloud", "trainer"): with_trainer(4, "partition=fed.data.IID(3)"),
    ("point_cloud", "callback"): with_callback("    L.seed_everything(14)", "partition=fed.data.IID(3)"),
    ("graph_batches", "trainer"): with_trainer(4, "partition=fed.data.IID(3)"),
    ("graph_batches", "callback"): with_callback("    L.seed_everything(15)", "partition=fed.data.IID(3)"),
    ("checkpointed", "trainer"): with_trainer(4, "partition=fed.data.IID(3)"),
    ("checkpointed", "callback"): with_callback("    L.seed_everything(16)", "partition=fed.data.IID(3)"),
    ("neural_forecast", "trainer"): """
-        trainer = L.Trainer(callbacks=callbacks, **self.trainer_kwargs, **options)
+        partition = fed.data.IID(3)
+        trainer = fed.FederatedTrainer(partition=partition, callbacks=callbacks, **self.trainer_kwargs, **options)
""",
    ("neural_forecast", "callback"): with_callback("    L.seed_everything(17)", "partition=fed.data.IID(3)"),
}  # fmt: skip

FALLING = {  # a logged value of each project, and the required ratio to the first value
    "cli": ("val_loss", 0.8),
    "hydra_template": ("val/loss", 0.8),
    "gan": ("val/distance", 0.8),
    "moco": ("train_loss_ssl", 0.95),
    "segmentation": ("train_loss", 0.95),
    "text": ("val_loss", 0.95),
    "lora": ("val_loss", 0.9),
    "forecasting": ("val_loss", 0.9),
    "graphs": ("val_loss", 0.8),
    "diffusion": ("val_loss", 0.9),
    "uncertainty": ("valRMSE", 0.9),
    "anomaly": ("train_loss", 0.8),
    "transfer": ("val_loss", 0.95),
    "landcover": ("val_loss", 0.9),
    "distillation": ("val_loss", 0.95),
    "metric_learning": ("val_loss", 0.9),
    "few_shot": ("val_loss", 0.9),
    "dqn": ("train_loss", 0.9),
    "csv_plot": ("val_loss", 0.95),
    "table": ("val_loss", 0.9),
    "clustering": ("val_loss", 0.98),
    "barlow_twins": ("online_val_loss", 0.9),
    "point_cloud": ("val_loss", 0.95),
    "graph_batches": ("val_loss", 0.9),
    "checkpointed": ("val_loss", 0.95),
    "neural_forecast": ("val_loss", 0.9),
}
# The log names lists that grow over the visits of a round: the recorder's list, and the notebook's lists.
SAID = {"segmentation": "`training_step_outputs`", "neural_forecast": "`train_trajectories`"}
NEEDED = {"text": "transformers", "lora": "peft"}
PROJECTS = [
    pytest.param(name, marks=pytest.mark.skipif(
        not find_spec(NEEDED.get(name, "torch")), reason="the extra `peft` is not installed"
    ))
    for name in FALLING
]  # fmt: skip


def source_of(name):
    return (FOLDER / f"{name}.py").read_text()


def federated(name, door):
    return federate(source_of(name), DIFFS[name, door])


@pytest.fixture
def run(tmp_path, monkeypatch):

    def run(source, name, *callbacks):
        monkeypatch.setattr(sys, "argv", ["script.py"])
        path = tmp_path / f"{name}_{len(list(tmp_path.glob('*.py')))}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        script = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(script)
            logger = MemoryLogger()
            quiet = {**QUIET, "logger": logger, "default_root_dir": str(tmp_path), "num_sanity_val_steps": 2}
            return script.main(callbacks=list(callbacks), **quiet), logger
        finally:
            del sys.modules[path.stem]

    return run


def assert_falls(name, logger):
    value, share = FALLING[name]
    curve = [score for _, score in logger.curve(value)]
    assert len(curve) >= 2
    assert curve[-1] < share * curve[0], curve


@pytest.mark.parametrize(("name", "door"), DIFFS)
def test_few_lines_change(name, door):
    changed = changed_lines(source_of(name), federated(name, door))
    assert 1 <= len(changed) <= MOST_LINES, "\n".join(changed)
    assert max(map(len, changed)) <= 122  # a sign, a space and a line
    assert "lightning_fed" not in source_of(name)


def quick_projects(*names):
    return quick(PROJECTS, [project for project in PROJECTS if project.values[0] in names])


@pytest.mark.parametrize("name", quick_projects())
def test_a_plain_project_trains(name, run):
    assert_falls(name, run(source_of(name), name)[1])


@pytest.mark.parametrize(
    "name",
    quick_projects("cli", "gan"),
)
def test_a_federated_project_trains_at_the_first_try(name, run, caplog, plain_trainer, monkeypatch):
    """Both entry points give equal weights; visits equal plain fits, and rounds average the visits."""
    recorder = Recorder()
    with caplog.at_level(logging.WARNING, "lightning_fed"):
        trainer, logger = run(federated(name, "trainer"), name, recorder)
        other, _ = run(federated(name, "callback"), name)
    ours = [record for record in caplog.records if record.name.startswith("lightning_fed")]
    known = {"`Recorder.visits`", SAID.get(name)}
    names = [", ".join(map(str, record.args[2:3])).split(", ") for record in ours]
    unexpected = [record.getMessage() for record, said in zip(ours, names, strict=True) if not known.issuperset(said)]
    assert unexpected == []
    assert_falls(name, logger)
    assert_same(state_of(other.lightning_module), state_of(trainer.lightning_module))
    num_clients = len(recorder.round(0))
    assert num_clients >= 2
    assert {value for _, value in logger.curve("fed/clients")} == {num_clients}

    for number, aggregate in enumerate(recorder.aggregates):
        visits = recorder.round(number)
        expected = average_reference([visit.update for visit in visits], [visit.num_samples for visit in visits])
        torch.testing.assert_close(aggregate, expected, rtol=1e-6, atol=1e-7)
    if name == "transfer":  # the backbone, frozen in round 0, trains by then
        return
    lengths = {visit.num_samples: len(visit.batches) for visit in recorder.round(0)}
    steps = (len(recorder.aggregates) - 1) * lengths[max(lengths)] + max(lengths.values())
    monkeypatch.setattr(lightning_fed, "scheduler_steps", lambda trainer: steps)  # for the whole fit
    module, seed = trainer.lightning_module, int(os.environ["PL_GLOBAL_SEED"])  # the seed set by the project
    for visit in recorder.round(0):
        module.load_state_dict(visit.start)
        for optimizer in trainer.optimizers:
            optimizer.state.clear()  # `LightningCLI` uses one optimizer in every fit
        L.seed_everything(visit_seed_reference(seed, 0, visit.client), verbose=False)
        plain = plain_trainer(max_epochs=1, gradient_clip_val=trainer.gradient_clip_val)
        batches = FixedBatches(visit.batches)
        batches.trainer = plain
        with warnings.catch_warnings(action="ignore"):  # metrics on validation data equal to the training data
            plain.fit(module, batches, batches)
        trained = [name for name in visit.end if not name.startswith("online_finetuner.")]  # by a callback
        assert_same(visit.end, state_of(module), trained)


@pytest.mark.parametrize("name", quick_projects("metric_learning"))
def test_fused_visits_are_ordinary_ones(name, run, monkeypatch):
    source = federated(name, "trainer")
    fused, _ = run(source, name)
    monkeypatch.setattr(fused_visits, "find_obstacle", lambda *arguments: "a test says so")
    ordinary, _ = run(source, name)
    assert_same(state_of(fused.lightning_module), state_of(ordinary.lightning_module))


@pytest.mark.slow
def test_what_is_unfrozen_later_trains(run):
    """The backbone is constant in round 0 and changes once unfrozen by the callback."""
    recorder = Recorder()
    run(federated("transfer", "trainer"), "transfer", recorder)
    first = recorder.visits[0].start
    backbone = [name for name in first if name.startswith("backbone.0")]
    assert_same(recorder.aggregates[1], first, backbone)
    assert not any(torch.equal(recorder.aggregates[2][name], first[name]) for name in backbone)


@pytest.mark.parametrize("name", quick(["gan", "forecasting", "anomaly"], ["forecasting"]))
def test_the_same_with_pytorch_lightning(name, run):
    """Under the other package name weights are equal, without further changes."""
    expected, _ = run(federated(name, "trainer"), name)
    plain = re.sub(r"\blightning(?=\.pytorch| as L)", "pytorch_lightning", source_of(name)).replace("ng.pytorch", "ng")
    assert "import pytorch_lightning as" in plain
    trainer, logger = run(federate(plain, DIFFS[name, "trainer"]), name)
    assert_same(state_of(trainer.lightning_module), state_of(expected.lightning_module))
    assert_falls(name, logger)
