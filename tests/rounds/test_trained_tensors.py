"""Trained tensors need an entry in the module's state; a fit refuses other tensors before the first batch."""

import pytest
import torch
from torch import nn

from lightning_fed.data import IID
from lightning_fed.errors import OptionError
from tests import models

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Criterion:
    def __init__(self):
        self.weight = nn.Parameter(torch.ones(1))


def add_scalar(module):
    module.log_alpha = torch.zeros(1, requires_grad=True)
    return [module.log_alpha]


def add_layers_in_a_list(module):
    module.more = [nn.Linear(3, 3)]
    return module.more[0].parameters()


def add_hidden_head(module):
    object.__setattr__(module, "head", nn.Linear(3, 3))
    return module.head.parameters()


def add_criterion(module):
    module.criterion = Criterion()
    return [module.criterion.weight]


def copy_master_weights(module):
    return [parameter.detach().clone().requires_grad_() for parameter in module.net.parameters()]


def scale_of_the_loss(module):
    return [nn.Parameter(torch.ones(()))]


REFUSED = [
    add_scalar,
    add_layers_in_a_list,
    add_hidden_head,
    add_criterion,
    copy_master_weights,
    scale_of_the_loss,
]


class Training(models.Module):
    """Trains the net, and from some epoch on additional tensors."""

    def __init__(self, add, epoch=0):
        super().__init__(models.mlp())
        self.extra = tuple(add(self))
        self.first_epoch = epoch
        self.num_batches = 0
        self.toggle(False)

    def toggle(self, requires_grad):
        for tensor in self.extra:
            tensor.requires_grad_(requires_grad)

    def on_fit_start(self):
        self.toggle(self.first_epoch == 0)

    def on_train_epoch_start(self):
        self.toggle(self.current_epoch >= self.first_epoch)

    def training_step(self, batch, batch_idx):
        self.num_batches += 1
        return super().training_step(batch, batch_idx) * sum(tensor.sum() for tensor in self.extra).exp()

    def configure_optimizers(self):
        return torch.optim.SGD([{"params": self.net.parameters()}, {"params": self.extra}], 0.01)


@pytest.mark.parametrize("add", REFUSED)
def test_a_trained_tensor_without_an_entry_is_refused_before_training(add, federated_trainer):
    module = Training(add)
    with pytest.raises(OptionError, match=r"Expected SGD to train .* shape .* `nn.ModuleList`"):
        federated_trainer(max_rounds=1).fit(module, models.as_datasets(models.vectors()))
    assert module.num_batches == 0


def test_a_tensor_is_refused_in_the_first_round_with_a_gradient(federated_trainer):
    module, clients = Training(add_scalar, epoch=1), models.as_datasets(models.vectors({"ann": 4, "bob": 4}))
    with pytest.raises(OptionError, match="Expected SGD to train"):
        federated_trainer(max_rounds=2).fit(module, clients)
    assert module.num_batches == 2  # the batches of round 0


def add_layers_of_a_module_list(module):
    module.more = nn.ModuleList([nn.Linear(3, 3)])
    return module.more.parameters()


def tie_parameter(module):
    module.again = module.net[0].weight.detach().requires_grad_()  # shared memory, as in flat optimizers
    return [module.again]


@pytest.mark.parametrize("add", [add_layers_of_a_module_list, tie_parameter])
def test_a_tensor_on_the_memory_of_an_entry_is_trained(add, federated_trainer):
    module = Training(add)
    federated_trainer(max_rounds=1).fit(module, models.as_datasets(models.vectors({"ann": 4, "bob": 4})))
    assert module.num_batches == 2


def test_one_client_trains_tensors_without_an_entry_as_a_plain_trainer(federated_trainer, plain_trainer):
    torch.manual_seed(0)
    modules = [Training(add_scalar), Training(add_scalar)]
    modules[1].load_state_dict(modules[0].state_dict())
    loader, _ = models.pooled(models.vectors({"ann": 12}), 4, shuffle=False)
    federated_trainer(max_rounds=2, partition=IID(1)).fit(modules[0], loader)
    plain_trainer(max_epochs=2).fit(modules[1], loader)
    assert torch.equal(modules[0].log_alpha, modules[1].log_alpha)
    assert modules[0].log_alpha.item() != 0
