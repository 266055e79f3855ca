"""Federated training on a GPU: CPU results, all precisions, compiled networks, processes, checkpoints.

`make test-gpu` runs these tests; without a GPU all are skipped.
"""

import copy
import gc
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import (
    FederatedCallback,
    FederatedDataModule,
    FederatedTrainer,
    FixedStatistics,
    LocalStatistics,
    Vectorized,
)
from lightning_fed.matching import MatchedAverage
from lightning_fed.modules import SampledSoftmaxHead
from tests import draws_script, models
from tests.conftest import QUIET
from tests.recorders import Recorder, assert_same, fit_fixed, loading, state_of
from tests.references import seed_reference, visit_seed_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist"),
]

ROOT = Path(__file__).parents[1]
# The device's generator draws the noise.
DRAWN_ON_THE_DEVICE = {"noise of the server"}
SEED = 4


@pytest.fixture(autouse=True)
def exact_arithmetic():
    """Disables TF32, and makes cuDNN deterministic."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = before


def trainer_on(accelerator, **options):
    return FederatedTrainer(**{**QUIET, "accelerator": accelerator, "seed": SEED, **options})


def fit(accelerator, module, data, val=None, **options):
    trainer = trainer_on(accelerator, **{"max_rounds": 2, **options})
    trainer.fit(module, FederatedDataModule(models.as_datasets(data), val, batch_size=16))
    return state_of(module), trainer


def assert_close(left, right, tolerance):
    """Equal up to rounding, relative to the norm of each entry."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        assert value.shape == right[name].shape, name
        difference = (value.double().cpu() - right[name].double().cpu()).norm()
        assert difference <= tolerance * value.double().norm().cpu() + 1e-12, (name, float(difference))


# --- CPU results ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", sorted(draws_script.JOBS.keys() - DRAWN_ON_THE_DEVICE))
def test_every_method_gives_what_it_gives_on_the_cpu(job, monkeypatch):
    """In double precision without dropout: up to rounding, amplified by 2 to 4 rounds of training."""
    monkeypatch.setattr(draws_script, "DROPOUT", 0.0)
    results = []
    for accelerator in ("cpu", "cuda"):
        torch.cuda.reset_peak_memory_stats()
        options = {"accelerator": accelerator, "devices": 1, "precision": "64-true"}
        results.append(draws_script.JOBS[job](options))
        results[-1].pop("drawn")
    assert torch.cuda.max_memory_allocated() > 0  # from the second fit
    assert_close(*results, tolerance=1e-9)


@pytest.mark.parametrize(
    ("net", "data", "optimizer"),
    [
        (models.mlp, models.vectors, models.adam),
        (models.cnn, models.images, models.momentum),
        (models.Recurrent, models.sentences, models.sgd),
        (models.Tied, models.sentences, models.momentum),
        (models.deeplab, lambda: models.scenes({"ann": 10, "bob": 7}), models.sgd),
        (models.unet, lambda: models.scenes({"ann": 10, "bob": 7}), models.sgd),
    ],
)
def test_networks_give_what_they_give_on_the_cpu(net, data, optimizer):
    results = []
    for accelerator in ("cpu", "cuda"):
        network = net()
        for layer in network.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
            if isinstance(layer, nn.LSTM):
                layer.dropout = 0.0
        state, _ = fit(accelerator, models.Module(network, optimizer), data(), precision="64-true")
        results.append(state)
    assert_close(*results, tolerance=1e-7)


@pytest.mark.parametrize(
    "batch_norm", ["average", "recalibrate", "personal", LocalStatistics(), "frozen", FixedStatistics(1)], ids=str
)
def test_treatments_of_batch_norm(batch_norm):
    results, numbers = [], []
    for accelerator in ("cpu", "cuda"):
        val = DataLoader(TensorDataset(*models.images({"val": 20})["val"]), 10)
        module = models.Module(models.cnn(), models.momentum)
        state, trainer = fit(
            accelerator,
            module,
            models.images(),
            val,
            batch_norm=batch_norm,
            precision="64-true",
            max_rounds=3,
        )
        results.append(state)
        numbers.append(
            {name: float(value) for name, value in trainer.callback_metrics.items() if "seconds" not in name}
        )
    assert_close(*results, tolerance=1e-8)
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5, abs=1e-6)


@pytest.mark.skipif(not hasattr(L.pytorch.callbacks, "EMAWeightAveraging"), reason="needs Lightning 2.6")
@pytest.mark.parametrize("device", [None, "cuda"])
def test_averages_of_weights(device):
    """The average is on the CPU (Lightning's default) or on the GPU."""
    results = []
    for accelerator in ("cpu", "cuda"):
        average = L.pytorch.callbacks.EMAWeightAveraging(device=device if accelerator == "cuda" else None, decay=0.5)
        module = models.Module(models.norm_mlp(), models.momentum)
        options = {"callbacks": [average], "precision": "64-true", "batch_norm": "average"}
        state, _ = fit(accelerator, module, models.vectors(), **options)
        results.append(state)
    assert_close(*results, tolerance=1e-9)


# --- A visit equals a plain fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("net", [models.norm_mlp, models.dropout_mlp])
def test_a_visit_is_a_plain_fit_bit_for_bit(net, precision):
    """With dropout, and with an initial loss scale that overflows in the first steps."""
    recorder, module = Recorder(), models.Module(net(), models.momentum)
    fit("cuda", module, models.vectors(), precision=precision, callbacks=[recorder], batch_norm="average")
    assert len(recorder.visits) == 10
    # later visits continue with another scale
    for visit in recorder.visits[:2] if precision == "16-mixed" else recorder.visits:
        plain = models.Module(net(), models.momentum)
        if precision == "bf16-true":
            plain = plain.bfloat16()
        plain.load_state_dict(visit.start)
        seed_reference(visit_seed_reference(SEED, visit.round, visit.client))
        options = {**QUIET, "accelerator": "cuda", "precision": precision, "max_epochs": 1}
        fit_fixed(L.Trainer(**options), plain, [copy.deepcopy(visit.batches)])
        assert_same(state_of(plain), visit.end)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "fednova", "feddyn", "moon", "ditto", "fedadam"])
def test_methods_train_in_mixed_precision(method, precision):
    """Close to float32: the loss scale skips few steps."""
    results = []
    for given in ("32-true", precision):
        state, trainer = fit(
            "cuda", models.Module(models.mlp(), models.sgd), models.vectors(), method=method, precision=given,
            max_rounds=6,
        )  # fmt: skip
        assert all(value.isfinite().all() for value in state.values())
        assert int(trainer.callback_metrics["fed/failed"]) == 0
        results.append(state)
    start = state_of(models.Module(models.mlp()))
    for name, value in results[0].items():
        moved = (value - start[name]).norm()
        assert (results[1][name] - value).norm() < 0.2 * moved, name


def test_a_loss_scale_that_overflows_costs_steps_and_nothing_else():
    """The scale starts at 65,536; large gradients overflow, so every client's first steps are skipped."""
    module = models.Module(
        models.mlp(), models.sgd, loss=lambda outputs, targets: 1e4 * F.cross_entropy(outputs, targets)
    )
    module.make_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1e-5)
    start = state_of(module)
    state, trainer = fit("cuda", module, models.vectors(), precision="16-mixed", max_rounds=5)
    assert int(trainer.callback_metrics["fed/failed"]) == 0
    assert all(value.isfinite().all() for value in state.values())
    assert any(not torch.equal(value, start[name]) for name, value in state.items())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2, "local_steps": 4}], ids=str
)
def test_fused_visits_are_ordinary_ones_bit_for_bit(precision, options):
    results = []
    for visits in ("lightning", "fused"):
        module = models.Module(models.norm_mlp(), models.adam)
        options = {"precision": precision, "visits": visits, "method": "fedprox", **options}
        state, trainer = fit("cuda", module, models.vectors(), **options)
        results.append(({**state, "loss": trainer.callback_metrics["train_loss"]}, trainer.global_step))
    assert results[0][1] == results[1][1]
    assert_same(results[0][0], results[1][0])


# --- Fast networks ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_networks(mode):
    """CUDA graphs (`reduce-overhead`) read parameters at the captured addresses, so a visit writes in place."""
    plain, _ = fit("cuda", models.Module(models.mlp(), models.momentum), models.vectors(), max_rounds=3)
    net = models.mlp()
    module = models.Module(net, models.momentum)
    with torch._inductor.config.patch(compile_threads=1):  # noqa: SLF001 - monkeypatch would unset the value
        module.net = torch.compile(net, mode=mode, dynamic=False)
        state, _ = fit("cuda", module, models.vectors(), max_rounds=3)
    state = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    assert_close(plain, state, tolerance=1e-4)


def test_channels_last_networks_stay_so():
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        net = models.cnn().to(memory_format=layout)
        module = models.Module(net, models.momentum)
        state, _ = fit("cuda", module, models.images(), precision="64-true", method="fedavgm")
        assert net[4].weight.is_contiguous(memory_format=layout)
        results.append(state)
    assert_close(*results, tolerance=1e-8)


# --- Vectorized clients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", [models.mlp, models.dropout_mlp, models.norm_mlp])
def test_vectorised_visits(net, caplog):
    results, steps = [], []
    for size in (1, 5):
        with caplog.at_level(logging.INFO, "lightning_fed"):
            state, trainer = fit(
                "cuda",
                models.Module(net(), models.momentum),
                models.vectors(),
                visits=Vectorized(size),
                precision="64-true",
            )
        results.append(state)
        steps.append(trainer.global_step)
    assert steps[1] < 0.7 * steps[0]
    assert_close(*results, tolerance=1e-9)


def test_a_single_process_with_nccl():
    alone, _ = fit("cuda", models.Module(models.norm_mlp(), models.momentum), models.vectors())
    module = models.Module(models.norm_mlp(), models.momentum)
    state, _ = fit("cuda", module, models.vectors(), strategy="client_parallel", devices=1)
    assert_same(alone, state)


@pytest.mark.parametrize("kind", ["several devices", "one device"])
def test_processes_give_what_one_gives(kind, tmp_path):
    """NCCL connects processes with one GPU each, gloo connects processes on a shared GPU."""
    if kind == "several devices" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m",
        "tests.gpu_processes_script", str(tmp_path), json.dumps(kind == "one device"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-6000:]
    from tests.gpu_processes_script import JOBS

    for job, options in JOBS.items():
        alone, _ = fit("cuda", models.Module(models.norm_mlp(), models.momentum), models.vectors(), **options)
        for rank in range(2):
            assert_close(alone, torch.load(tmp_path / f"{job}-{rank}.pt", weights_only=True), tolerance=1e-5)


# --- Across devices ---------------------------------------------------------------------------------------------------


class Stop(FederatedCallback):
    def __init__(self, after):
        self.after = after

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch + 1 == self.after:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "last.ckpt")
            trainer.should_stop = True


@pytest.mark.parametrize(
    "method",
    [
        "fedavg", "scaffold", "feddyn", "fednova", "fedadam", "fedavgm", "ditto", "moon", "fedala", "fesem",
        "fedmargin", "centeredclipping", "feddane", "qffl",
    ],
)  # fmt: skip
@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_fit_goes_on_on_another_device(method, first, second, tmp_path):
    """With personal layers and stored optimizer states in a folder; bit for bit on the same device."""
    clients, options = models.vectors(), {"method": method, "max_rounds": 4}
    if method == "fedavg":
        options |= {"personal": ["net.head.*"], "optimizer_state": "keep"}
    whole, _ = fit("cuda", models.Module(models.BaseAndHead(), models.momentum), clients, **options)
    options |= {"store": tmp_path / "clients", "default_root_dir": tmp_path}
    fit(first, models.Module(models.BaseAndHead(), models.momentum), clients, callbacks=[Stop(2)], **options)
    module = models.Module(models.BaseAndHead(), models.momentum)
    trainer = trainer_on(second, **options)
    data = FederatedDataModule(models.as_datasets(clients), batch_size=16)
    trainer.fit(module, data, ckpt_path=tmp_path / "last.ckpt", **loading(weights_only=False))
    assert trainer.current_epoch == 4
    if first == second:
        assert_same(whole, state_of(module))
    else:
        assert_close(whole, state_of(module), tolerance=1e-4)


def test_a_checkpoint_of_a_gpu_is_read_without_one(tmp_path):
    fit(
        "cuda", models.Module(models.norm_mlp(), models.adam), models.vectors(), method="scaffold",
        callbacks=[Stop(1)], default_root_dir=tmp_path, store=tmp_path / "clients",
    )  # fmt: skip
    code = (
        "import sys, torch; from lightning_fed import *;"
        "state = torch.load(sys.argv[1], map_location='cpu', weights_only=False);"
        "assert not torch.cuda.is_available(); print(len(state['state_dict']))"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "last.ckpt")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    files = list((tmp_path / "clients").rglob("*.safetensors"))
    assert files


# --- Matching, sampled softmax ----------------------------------------------------------------------------------------


def test_matching_on_the_device():
    """Aligns and merges networks as on the CPU."""

    def networks():
        made = []
        for seed in range(3):
            torch.manual_seed(seed)
            made.append(
                nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).double()
            )
        return made

    example = torch.zeros(2, 6).double()
    expected = MatchedAverage().merge(networks(), example_input=example)
    found = MatchedAverage().merge([net.cuda() for net in networks()], example_input=example.cuda())
    assert all(value.device.type == "cuda" for value in found.module.state_dict().values())
    assert_close(expected.module.state_dict(), {k: v.cpu() for k, v in found.module.state_dict().items()}, 1e-9)


def test_a_client_holds_its_rows_only_on_the_device():
    """For a head with many classes a visit only allocates rows, never whole tables."""

    class Large(models.Module):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__(nn.Sequential(nn.Linear(6, 64), nn.ReLU(), SampledSoftmaxHead(64, 200_000)))

    table = 200_000 * 65 * 4
    clients = {name: (inputs, targets * 60_000) for name, (inputs, targets) in models.vectors().items()}

    class Peak(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()

        def on_client_end(self, trainer, module, client, update):
            self.peaks = [*getattr(self, "peaks", []), torch.cuda.max_memory_allocated() - self.start]

    peak = Peak()
    state, _ = fit("cuda", Large(), clients, method="fedss:num_negatives=50", callbacks=[peak])
    assert len(peak.peaks) == 10
    assert max(peak.peaks[1:]) < 0.2 * table  # in the first visit libraries allocate caches
    assert state["net.2.weight"].shape == (200_000, 64)


# --- Cost -------------------------------------------------------------------------------------------------------------


class Synchronisations(FederatedCallback):
    """Counts synchronisations with the device while updates are created, checked and added."""

    def __init__(self):
        self.counts = []

    def on_client_end(self, trainer, module, client, update):
        self._catcher = warnings.catch_warnings(record=True)
        self.caught = self._catcher.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def on_client_visit_end(self, trainer, module, client):
        torch.cuda.set_sync_debug_mode("default")
        self._catcher.__exit__(None, None, None)
        places = [
            f"{warning.filename}:{warning.lineno}" for warning in self.caught if "called a sync" in str(warning.message)
        ]
        self.counts.append(places)


def test_the_host_waits_for_an_update_three_times_at_most_however_many_entries():
    found = []
    for depth in (2, 40):
        torch.manual_seed(0)
        layers = [part for _ in range(depth) for part in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())]
        module = models.Module(nn.Sequential(*layers, nn.Linear(6, models.CLASSES)), models.sgd)
        watch = Synchronisations()
        fit("cuda", module, models.vectors(), callbacks=[watch], batch_norm="average")
        found.append({len(count) for count in watch.counts})
    assert found[0] == found[1]
    assert max(found[0]) <= 3, watch.counts[0]


def test_memory_does_not_grow_with_the_clients():
    """At most 12 float32 copies of the model: module, gradients, broadcast, update, and float64 sums, addend and
    mean.
    """
    peaks = []
    for count in (2, 2, 12):  # the first fit includes the libraries' caches
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        layers = nn.Linear(6, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 3)
        state, trainer = fit(
            "cuda",
            models.Module(nn.Sequential(*layers)),
            models.vectors({f"client {number}": 16 for number in range(count)}),
        )
        del trainer, layers
        peaks.append((torch.cuda.max_memory_allocated() - start) / sum(value.numel() * 4 for value in state.values()))
    assert peaks[2] <= peaks[1] + 0.1, peaks
    assert peaks[2] <= 13, peaks
