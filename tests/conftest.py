"""Fixtures of the tests, in addition to the fixtures shared with examples: leak checks, and quiet Trainers.

Imports are inside functions, as in the ``conftest.py`` above.
"""

import functools
import gc
import inspect
import logging
import os
import sys
import threading
import weakref

import pytest

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def pytest_configure(config):
    """On a GPU, disables TF32 and makes cuDNN deterministic."""
    QUIET["accelerator"] = config.getoption("accelerator")
    if QUIET["accelerator"] != "cpu":
        import torch

        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Excludes tests from the search for docstring examples, which takes as long as the collection."""
    return [collector for collector in (yield) if type(collector).__name__ != "DoctestModule"]


def pytest_collection_modifyitems(items):
    """Each case of a table runs through one entry point, alternating; the other runs with `make test-slow`."""
    tables = {}
    for item in items:
        params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        door = params.pop("either_trainer", None)
        if door is not None and not item.get_closest_marker("slow"):
            case = tuple(map(id, params.values()))  # the same objects for both entry points
            tables.setdefault((item.path, item.originalname), {}).setdefault(case, {})[door] = item
    for cases in tables.values():
        both = [doors for doors in cases.values() if len(doors) == 2]
        both.sort(key=lambda doors: doors["trainer"].name)  # independent of the order of collection
        for place, doors in enumerate(both if len(both) > 1 else []):
            doors[("trainer", "callback")[place % 2]].add_marker(pytest.mark.slow)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU that torch can use")


@pytest.fixture(autouse=True)
def no_leaks():
    """A test leaves no thread behind, and restores torch's global switches."""
    import torch

    before, num_threads = set(threading.enumerate()), torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    if left:
        gc.collect()  # unreferenced loaders and writers
        for thread in left:
            thread.join(timeout=5)
    assert not [thread.name for thread in left if thread.is_alive()]


@pytest.fixture(autouse=True)
def console_as_it_was():
    """Lightning's rich bar changes rich's global console: escape codes would be in the tables of later tests."""
    before = console_options()
    yield
    if console_options() is not before:
        sys.modules["rich"].reconfigure()


def console_options():
    """A dictionary replaced by `rich.reconfigure`."""
    rich = sys.modules.get("rich")
    return None if rich is None else vars(rich.get_console())


@pytest.fixture(autouse=True)
def loaders_as_they_were():
    """If building loaders raises, Lightning leaves ``DataLoader`` and ``BatchSampler`` patched."""
    from torch.utils.data import BatchSampler, DataLoader

    names = ("__init__", "__setattr__", "__delattr__")
    before = {(cls, name): vars(cls).get(name) for cls in (DataLoader, BatchSampler) for name in names}
    yield
    for (cls, name), method in before.items():
        if vars(cls).get(name) is method:
            continue
        if method is None:
            delattr(cls, name)
        else:
            setattr(cls, name, method)


@pytest.fixture(scope="module")
def subclasses_are_remembered():
    """Until the next import, command lines share the search for subclasses."""
    from lightning_fed.recipe import remembered_subclasses

    with remembered_subclasses():
        yield


@pytest.fixture(scope="module")
def no_recipe_in_checkpoints():
    """Writing the recipe takes as long as a short run."""
    from lightning_fed.recipe import FederatedCLI

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedCLI, "config_dump", {}, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk():
    """Disables `fsync`, which only matters for power failures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_look_at_installed_plugins():
    """Each ``Trainer`` searches all installed packages for callbacks, for as long as a small fit takes."""
    from lightning.fabric.utilities import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", functools.cache(registry.entry_points))
        yield


@pytest.fixture(autouse=True, scope="session")
def logged_values_stay_on_their_device():
    """Each ``self.log`` copies the metric to the value's device: a tenth of a small fit."""
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric  # noqa: TID251 - see above

    move = _ResultMetric.to

    def to(self, device):
        return self if self.is_tensor and self.value.device == device else move(self, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ResultMetric, "to", to)
        yield


@pytest.fixture(autouse=True, scope="session")
def signatures_are_read_once():
    """Lightning reads the signature of a hook in every call, and a Trainer reads its signature: a fortieth of a fit."""
    from lightning.pytorch import Trainer

    of_methods, of_trainers = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()
    getfullargspec, signature = inspect.getfullargspec, inspect.signature

    def read_method(func):
        if not inspect.ismethod(func):
            return getfullargspec(func)
        if func.__func__ not in of_methods:
            of_methods[func.__func__] = getfullargspec(func)
        return of_methods[func.__func__]

    def read_trainer(obj, **options):
        if options or not (isinstance(obj, type) and issubclass(obj, Trainer)):
            return signature(obj, **options)
        if obj not in of_trainers:
            of_trainers[obj] = signature(obj)
        return of_trainers[obj]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "getfullargspec", read_method)
        patch.setattr(inspect, "signature", read_trainer)
        yield


@pytest.fixture(autouse=True, scope="session")
def steps_are_not_profiled():
    """Each optimizer step is a range for PyTorch's profiler: a fiftieth of a small fit."""
    from torch.autograd.profiler import record_function

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_function, "__enter__", lambda self: self)
        patch.setattr(record_function, "__exit__", lambda self, *error: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def seeds_of_present_devices():
    """``torch.manual_seed`` stores a formatted stack for each absent device: a fiftieth of a small fit."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for device in () if torch.accelerator.is_available() else (torch.cuda, torch.xpu, torch.mtia):
            patch.setattr(device, "manual_seed_all", lambda seed: None, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_search_for_gpus():
    """Without a GPU, ``torch.cuda.device_count`` tries to load NVIDIA's library in each call."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", functools.cache(torch.cuda.device_count))
        yield


@pytest.fixture(autouse=True, scope="session")
def short_wait_for_persistent_workers():
    """Garbage collection waits five seconds for the worker processes in a reference cycle, then ends the processes."""
    from torch.utils.data import _utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
        yield


@pytest.fixture(autouse=True, scope="session")
def torch_logs_reach_the_root():
    """For each test, pytest adds six handlers to each logger without propagation: torch has about 60."""
    import torch  # noqa: F401 - creates the loggers

    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] == "torch":
            logging.getLogger(name).propagate = True
    logging.getLogger("torch.__trace").handlers.clear()  # with a handler, each compilation is traced


@pytest.fixture(autouse=True, scope="session")
def quiet_lightning():
    """Silences Lightning; the package's warnings remain for `caplog`, other lines must be requested."""
    logging.getLogger("lightning_fed").setLevel(logging.WARNING)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.fixture
def plain_trainer(tmp_path):
    """Makes an ``L.Trainer`` without logger, progress bar and checkpoints; all arguments can be overridden."""
    import lightning as L

    def make(**arguments):
        return L.Trainer(**{**QUIET, "default_root_dir": tmp_path, **arguments})

    return make


@pytest.fixture
def federated_trainer(tmp_path):
    """Makes a ``FederatedTrainer`` with the same defaults."""
    from lightning_fed import FederatedTrainer

    def make(**arguments):
        return FederatedTrainer(**{**QUIET, "default_root_dir": tmp_path, **arguments})

    return make


@pytest.fixture(params=["trainer", "callback"])
def either_trainer(request, federated_trainer, plain_trainer):
    """Makes a ``FederatedTrainer``, or an ``L.Trainer`` with ``Federation``, from the same arguments."""
    from lightning_fed import Federation
    from lightning_fed.callbacks import ClientEvaluation

    def make(max_rounds, callbacks=(), **arguments):
        if request.param == "trainer":
            return federated_trainer(max_rounds=max_rounds, callbacks=list(callbacks), **arguments)
        own = {name: arguments.pop(name) for name in inspect.signature(Federation).parameters if name in arguments}
        evaluation = ClientEvaluation()
        evaluation.is_default = True  # as in `FederatedTrainer`
        added = [Federation(**own), *callbacks, evaluation]
        return plain_trainer(max_epochs=max_rounds, callbacks=added, **arguments)

    return make
