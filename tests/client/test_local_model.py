"""The client side: loading, storing and sending models; optimizers restarted in every visit."""

import copy

import pytest
import torch
from torch import nn

from lightning_fed.callbacks.federation import find_federation
from lightning_fed.client.client_store import FolderStore, MemoryStore
from lightning_fed.client.local_model import LocalModel
from lightning_fed.client.local_optimizers import LocalOptimizers
from lightning_fed.client.packed_optimizers import pack_optimizers, unpack_optimizers
from lightning_fed.messages import Broadcast
from lightning_fed.model.entries import entry_policies
from tests import models
from tests.breadth import quick

OPTIMIZERS = {
    "ASGD": {"lr": 0.1, "t0": 1},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "LBFGS": {"lr": 0.5, "max_iter": 3, "history_size": 3},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "SparseAdam": {},
    "Counting": {"lr": 0.1},
}
KEPT = [name for name in OPTIMIZERS if name != "LBFGS"]


def test_every_optimizer_of_torch_is_in_the_table():
    kinds = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}
    assert kinds == {name for name in OPTIMIZERS if hasattr(torch.optim, name)}


class Counting(torch.optim.Optimizer):
    """Counts steps in the parameter groups, as schedule-free optimizers and Prodigy do."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "k": 0, "total": 0.0})

    @torch.no_grad()
    def step(self, closure):
        closure()
        for group in self.param_groups:
            group["k"] += 1
            group["total"] = torch.as_tensor(group["total"]) + 0.5
            for parameter in group["params"]:
                parameter -= group["lr"] / group["k"] * parameter.grad / group["total"]


class Job:
    """A small problem with one of torch's optimizers, in two groups if supported."""

    def __init__(self, name, lr=None):
        kind = getattr(torch.optim, name, globals().get(name))
        if kind is None:
            pytest.skip(f"this torch has no {name}")
        generator = torch.Generator().manual_seed(0)
        self.is_sparse = name == "SparseAdam"
        self.parameters = [nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(2)]
        self.targets = torch.randn(4, 3, generator=generator)
        options = OPTIMIZERS[name] | ({} if lr is None else {"lr": lr})
        groups = self.parameters if name == "LBFGS" else [{"params": [p]} for p in self.parameters]
        self.optimizer = kind(groups, **options)

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.step(self.closure)
        return [parameter.detach().clone() for parameter in self.parameters]

    def closure(self):
        self.optimizer.zero_grad()
        with torch.enable_grad():
            loss = ((self.parameters[0] * self.parameters[1] - self.targets) ** 2).sum()
        loss.backward()
        if self.is_sparse:
            for parameter in self.parameters:
                parameter.grad = parameter.grad.to_sparse(1)
        return loss

    def start(self):
        with torch.no_grad():
            for parameter, fresh in zip(self.parameters, self.fresh_parameters(), strict=True):
                parameter.copy_(fresh)

    @staticmethod
    def fresh_parameters():
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(4, 3, generator=generator) for _ in range(2)]


def assert_equal(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left.to_dense(), right.to_dense())
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            assert_equal(left[name], right[name])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for left_item, right_item in zip(left, right, strict=True):
            assert_equal(left_item, right_item)
    else:
        assert left == right or (left != left and right != right)


# --- Optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_visit_starts_with_a_fresh_optimizer(name):
    job = Job(name)
    for group in job.optimizer.param_groups:
        group["lr"] = 0.03  # as set by an epoch scheduler in earlier rounds
    local = LocalOptimizers([job.optimizer])
    fresh = Job(name, lr=0.03)
    expected_state = copy.deepcopy(fresh.optimizer.state_dict())
    expected = fresh.train(4)
    for position in range(3):
        job.start()
        local.start_visit()
        assert_equal(job.optimizer.state_dict(), expected_state)
        for left, right in zip(job.train(4), expected, strict=True):
            assert torch.equal(left, right)
        assert local.end_visit(position) == {}
    for group in job.optimizer.param_groups:
        group["lr"] = 0.01  # as set by an epoch scheduler at the last batch
    local.end_round([])
    assert_equal(job.optimizer.state_dict(), Job(name, lr=0.01).optimizer.state_dict())


@pytest.mark.parametrize("name", quick(KEPT, [name for name in KEPT if name not in ("RAdam", "RMSprop")]))
def test_what_is_packed_comes_back(name, tmp_path):
    """Through a store into an optimizer of another process, which continues identically."""
    job = Job(name)
    job.train(3)
    store = FolderStore(tmp_path)
    store.put("a", 0, pack_optimizers([job.optimizer]))
    values = [parameter.detach().clone() for parameter in job.parameters]
    expected = job.train(3)
    restored_job = Job(name)
    with torch.no_grad():
        for parameter, value in zip(restored_job.parameters, values, strict=True):
            parameter.copy_(value)
    unpack_optimizers([restored_job.optimizer], store.get("a"))
    for left, right in zip(restored_job.train(3), expected, strict=True):
        assert torch.equal(left, right)
    assert_equal(restored_job.optimizer.state_dict(), job.optimizer.state_dict())


@pytest.mark.parametrize("name", KEPT)
def test_keeping_optimizer_state(name):
    """Each client continues with the stored state; a new client starts without state."""
    job = Job(name)
    local = LocalOptimizers([job.optimizer], mode="keep")
    stored = {}
    expected = {client: Job(name) for client in "ab"}
    for client in "abaab":
        local.start_visit(stored.get(client))
        with torch.no_grad():
            for parameter, expected_value in zip(job.parameters, expected[client].parameters, strict=True):
                parameter.copy_(expected_value)
        for left, right in zip(job.train(2), expected[client].train(2), strict=True):
            assert torch.equal(left, right), client
        stored[client] = {key: value.clone() for key, value in local.end_visit().items()}
    local.end_round([])
    assert_equal(job.optimizer.state_dict(), Job(name).optimizer.state_dict())


def test_hyperparameters_are_the_rounds_where_state_is_kept():
    job = Job("Adam")
    job.train(2)
    packed = pack_optimizers([job.optimizer])
    restored_job = Job("Adam", lr=0.5)
    unpack_optimizers([restored_job.optimizer], packed)
    assert [group["lr"] for group in restored_job.optimizer.param_groups] == [0.5, 0.5]


def test_state_that_is_not_of_tensors_and_numbers():
    job = Job("LBFGS")
    job.train(2)
    with pytest.raises(TypeError, match=r"state of LBFGS to hold tensors and numbers.*use optimizer_state='reset'"):
        pack_optimizers([job.optimizer])


def test_numbers_and_names_are_packed():
    """Optimizers in other libraries have such states."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    state = {"step": 3, "scale": 1 / 3, "is_warm": True, "none": None, "buffer": torch.ones(2)}
    optimizer.state[parameter] = dict(state)
    packed = pack_optimizers([optimizer])
    assert all(isinstance(value, torch.Tensor) for value in packed.values())
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1)
    unpack_optimizers([optimizer], packed)
    (restored,) = optimizer.state_dict()["state"].values()
    del state["none"]
    assert_equal(restored, state)


def test_several_optimizers_keep_their_own():
    jobs = [Job("Adam"), Job("SGD"), Job("Adagrad")]
    for job in jobs:
        job.train(2)
    packed = pack_optimizers([job.optimizer for job in jobs])
    others = [Job("Adam"), Job("SGD"), Job("Adagrad")]
    unpack_optimizers([restored_job.optimizer for restored_job in others], packed)
    for job, restored_job in zip(jobs, others, strict=True):
        assert_equal(restored_job.optimizer.state_dict(), job.optimizer.state_dict())


# --- Schedulers and loss scale ----------------------------------------------------------------------------------------

SCHEDULERS = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=50),
    "CosineAnnealingWarmRestarts": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "CyclicLR": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[2],
    ),
}


def rates(optimizer):
    return [(group["lr"], group.get("momentum")) for group in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_step_schedulers_start_anew_and_go_on_from_the_median(name):
    """Visits have equal learning rates; the next round starts where the visit with the median number of steps ended."""
    job = Job("SGD")
    scheduler = SCHEDULERS[name](job.optimizer)
    plain = Job("SGD")
    plain_scheduler = SCHEDULERS[name](plain.optimizer)

    def visit(which, schedule, steps):
        seen = []
        for _ in range(steps):
            seen.append(rates(which.optimizer))
            which.train(1)
            schedule.step()
        return seen

    for _ in range(2):  # rounds
        local = LocalOptimizers([job.optimizer], [scheduler])
        expected = visit(plain, plain_scheduler, 4)
        for position, steps in enumerate((3, 5, 4, 7)):
            local.start_visit()
            assert visit(job, scheduler, steps)[:4] == expected[:steps]
            local.end_visit(position)
        local.end_round([0, 1, 2])  # the last visit does not count
        assert rates(job.optimizer) == rates(plain.optimizer)
        assert scheduler.last_epoch == plain_scheduler.last_epoch


def test_rounds_without_a_good_visit_leave_the_schedulers_alone():
    job = Job("SGD")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.5)
    local = LocalOptimizers([job.optimizer], [scheduler])
    local.start_visit()
    job.train(1)
    scheduler.step()  # and the visit fails
    local.end_round([])
    assert rates(job.optimizer) == [(0.1, 0.9)] * 2
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize("order", [(5, 9), (9, 5)], ids=["fewer first", "fewer last"])
def test_a_scheduler_per_round_and_one_per_batch(order):
    """The epoch scheduler steps from the learning rate after the shorter visit, for any order of visits."""
    job = Job("SGD")
    per_batch = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.9)
    per_round = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, gamma=0.5)
    local = LocalOptimizers([job.optimizer], [per_batch], epoch_schedulers=[per_round])
    for position, steps in enumerate(order):
        local.start_visit()
        for _ in range(steps):
            job.train(1)
            per_batch.step()
        if steps == order[-1]:
            per_round.step()  # as Lightning does, before the end of the last visit
        local.end_visit(position)
    local.end_round([0, 1])
    assert rates(job.optimizer)[0][0] == pytest.approx(0.1 * 0.9**5 * 0.5, rel=1e-12)
    assert (per_batch.last_epoch, per_round.last_epoch) == (5, 1)


def test_schedulers_of_other_optimizers_are_not_undone():
    """The first optimizer's scheduler steps per batch, the second's per round."""
    first, second = Job("SGD"), Job("Adam", lr=0.4)
    per_batch = torch.optim.lr_scheduler.ExponentialLR(first.optimizer, 0.5)
    per_round = torch.optim.lr_scheduler.ExponentialLR(second.optimizer, 0.25)
    optimizers = [first.optimizer, second.optimizer]
    local = LocalOptimizers(optimizers, [per_batch], epoch_schedulers=[per_round])
    local.start_visit()
    first.train(1)
    second.train(1)
    per_batch.step()
    per_round.step()
    local.end_visit()
    local.end_round([0])
    assert rates(first.optimizer)[0][0] == pytest.approx(0.05)
    assert rates(second.optimizer)[0][0] == pytest.approx(0.1)


def test_the_loss_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.tensor(1.0))  # as the first loss does
    local = LocalOptimizers([Job("SGD").optimizer], scaler=scaler)
    for position, scale in enumerate((2048.0, 8192.0, 512.0)):
        local.start_visit()
        assert scaler.get_scale() == 1024.0
        scaler.update(scale)
        local.end_visit(position)
    assert local.checkpoint()[2]["scale"] == 1024.0
    local.end_round(range(3))
    assert scaler.get_scale() == 2048.0  # the median, for any number of steps


def test_the_state_for_checkpoints_is_that_of_the_rounds_start():
    job = Job("Adam")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.5)
    start = copy.deepcopy(job.optimizer.state_dict()), copy.deepcopy(scheduler.state_dict())
    local = LocalOptimizers([job.optimizer], [scheduler])
    local.start_visit()
    job.train(2)
    scheduler.step()
    optimizers, schedulers, scaler = local.checkpoint()
    assert_equal(optimizers, [start[0]])
    assert_equal(schedulers, [start[1]])
    assert scaler == {}
    optimizers[0]["param_groups"][0]["lr"] = 99.0  # a copy
    local.start_visit()
    assert rates(job.optimizer)[0][0] == 1e-3


# --- Model ------------------------------------------------------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


@pytest.fixture
def local():
    module = net()
    policies = entry_policies(module, personal=["2.*"], frozen=[nn.BatchNorm1d])
    local = LocalModel(module, policies, MemoryStore())
    local.module = module
    return local


def fill(module, value):
    with torch.no_grad():
        for entry in module.state_dict().values():
            entry.fill_(value)


def test_what_goes_where(local):
    start = copy.deepcopy(local.module.state_dict())
    assert set(local.global_state()) == {"0.weight", "0.bias"}
    assert local.parameters == ["0.weight", "0.bias"]
    broadcast = Broadcast(0, {"0.weight": torch.full((2, 2), 7.0), "0.bias": torch.zeros(2)})
    local.load_client("a", broadcast.state)
    state = local.module.state_dict()
    assert state["0.weight"].unique().tolist() == [7.0]
    for name in ("1.weight", "1.running_mean", "1.num_batches_tracked", "2.weight", "2.bias"):
        assert torch.equal(state[name], start[name])
    fill(local.module, 3)
    update = local.answer("a", 5)
    assert (update.client, update.num_samples, set(update.state)) == ("a", 5, {"0.weight", "0.bias"})
    local.store_client("a", 0, {}, {})
    fill(local.module, 4)
    assert update.state["0.bias"].tolist() == [3.0, 3.0]  # a copy
    local.load_client("b", broadcast.state)
    # no personal value yet: the server's value
    assert torch.equal(local.module.state_dict()["2.weight"], start["2.weight"])
    local.load_client("a", broadcast.state)
    state = local.module.state_dict()
    assert state["2.weight"].unique().tolist() == [3.0]
    assert torch.equal(state["1.weight"], start["1.weight"])
    local.load_global(broadcast.state)
    state = local.module.state_dict()
    for name in start:
        assert torch.equal(state[name], broadcast.state.get(name, start[name]))


def test_messages_that_do_not_fit(local):
    before = copy.deepcopy(local.module.state_dict())
    with pytest.raises(ValueError, match=r"unexpected entries: '3\.bias'"):
        local.load_client("a", {"3.bias": torch.zeros(1)})
    local.store.put("a", 0, {"2.weight": torch.zeros(3, 3)})
    with pytest.raises(ValueError, match=r"entry '2\.weight' has shape"):
        local.load_client("a", local.global_state())
    for name, value in local.module.state_dict().items():
        assert torch.equal(value, before[name])


def test_nothing_is_kept_where_nothing_is_personal():
    local = LocalModel(net(), entry_policies(net()), MemoryStore())
    local.store_client("a", 0, {}, {})
    assert local.store.get("a") is None


def test_personal_entries_and_optimizer_state_live_side_by_side(local):
    job = Job("SGD")
    job.train(1)
    packed = pack_optimizers([job.optimizer])
    fill(local.module, 3)
    local.store_client("a", 0, packed, {})
    stored = local.recall("a")
    assert packed.keys() < stored.keys()
    local.load_client("a", local.global_state(), stored=stored)
    assert local.module.state_dict()["2.bias"].tolist() == [3.0]
    assert local.recall("b") == {}


def test_buffers_that_are_not_saved_start_anew():
    module = net()
    module.register_buffer("cache", torch.zeros(2), persistent=False)
    local = LocalModel(module, entry_policies(module), MemoryStore())
    module.cache.fill_(5.0)
    local.load_client("a", local.global_state())
    assert module.cache.tolist() == [0.0, 0.0]
    module.cache.fill_(5.0)
    local.load_global(local.global_state())
    assert module.cache.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bank", [torch.ones(3), torch.ones(1, dtype=torch.float64)])
def test_a_buffer_that_changes_its_form_is_put_back(bank):
    module = net()
    module.register_buffer("bank", torch.zeros(1))
    local = LocalModel(module, entry_policies(module), MemoryStore())
    start = local.global_state()
    module.bank = bank
    assert local.global_state()["bank"].equal(bank)
    local.load_global(start)
    assert module.bank.dtype == torch.float32
    assert module.bank.tolist() == [0.0]


class Centred(models.Module):
    """Stores a running mean in a buffer, either in place or as a new tensor."""

    def __init__(self, replaces, persistent):
        super().__init__(models.mlp(), models.momentum)
        self.replaces = replaces
        self.register_buffer("centre", torch.zeros(models.CLASSES), persistent=persistent)

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        loss = nn.functional.cross_entropy(outputs - self.centre, batch[1])
        mean = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        if self.replaces:
            self.centre = mean
        else:
            self.centre.copy_(mean)
        return loss


WITHOUT_VALIDATION = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


@WITHOUT_VALIDATION
@pytest.mark.parametrize(("persistent", "options"), [(False, {}), (True, {}), (True, {"personal": ["centre"]})])
def test_buffers_that_are_replaced_are_as_those_that_are_written_into(options, persistent, federated_trainer):
    """No client starts from another client's buffer; sent and stored values equal the module's."""
    states = []
    for replaces in (False, True):
        torch.manual_seed(0)
        module, store = Centred(replaces, persistent), MemoryStore()
        trainer = federated_trainer(max_rounds=2, seed=0, store=store, **options)
        trainer.fit(module, models.as_datasets(models.vectors()))
        states.append([dict(module.named_parameters()) | dict(module.named_buffers())])
        states[-1] += [store.get(client) or {} for client in models.vectors()]
    for state, reference in zip(*states, strict=True):
        assert state.keys() == reference.keys()
        assert all(torch.equal(value, reference[name]) for name, value in state.items())
    assert bool(states[0][0]["centre"].any()) == (persistent and not options)


@WITHOUT_VALIDATION
def test_a_buffer_that_is_no_tensor_any_more_is_refused(federated_trainer):
    class Forgetful(models.Module):
        def __init__(self):
            super().__init__(models.mlp())
            self.register_buffer("centre", torch.zeros(2))

        def on_train_batch_end(self, *arguments):
            self.centre = None

    with pytest.raises(ValueError, match="Expected buffer 'centre' to stay a tensor, but training replaced it by None"):
        federated_trainer(max_rounds=1).fit(Forgetful(), models.as_datasets(models.vectors()))


@WITHOUT_VALIDATION
def test_entries_that_are_added_between_rounds_get_a_policy(federated_trainer):
    class Growing(models.Module):
        def on_train_epoch_end(self):
            if not hasattr(self, "grown"):
                self.grown, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    trainer = federated_trainer(max_rounds=2, personal=["*.bias"])
    trainer.fit(Growing(models.mlp()), models.as_datasets(models.vectors()))
    policies = find_federation(trainer).policies
    added = {name: policy for name, policy in policies.items() if name.startswith(("grown.", "head."))}
    assert added == {
        "grown.weight": "shared",
        "grown.bias": "personal",
        "head.weight": "shared",
        "head.bias": "personal",
    }


def test_rows_that_do_not_fit_leave_the_module_as_it_was():
    """Neither the valid entries nor the rows are written."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))
    policies = dict.fromkeys(net.state_dict(), "shared") | {"1.weight": "sliced"}
    local = LocalModel(net, policies, MemoryStore())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for rows in (torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"each row of entry '1\.weight' has dtype"):
            local.load_client("a", {**local.global_state(), "0.bias": torch.ones(2), "1.weight": rows})
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
