"""Deep Q-learning in the style of Lightning's bolts: an iterable data set plays, a target network follows."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset


class Corridor:
    def __init__(self, start=2):
        self.start = start

    def reset(self):
        self.place = self.start
        return self.place

    def step(self, action):
        self.place = min(4, max(0, self.place + (1 if action else -1)))
        is_over = self.place in (0, 4)
        return self.place, float(self.place == 4), is_over


class ReplayStream(IterableDataset):
    """Plays randomly and yields transitions endlessly."""

    def __init__(self, start=2):
        self.environment = Corridor(start)

    def __iter__(self):
        state = self.environment.reset()
        while True:
            action = int(torch.randint(2, ()))
            after, reward, is_over = self.environment.step(action)
            yield state, action, reward, after, is_over
            state = self.environment.reset() if is_over else after


class DQN(L.LightningModule):
    def __init__(self, gamma=0.9, sync_rate=5):
        super().__init__()
        self.net, self.target_net = nn.Linear(5, 2), nn.Linear(5, 2)
        self.target_net.load_state_dict(self.net.state_dict())
        self.gamma, self.sync_rate = gamma, sync_rate

    def training_step(self, batch, batch_idx):
        states, actions, rewards, after, is_over = batch
        values = self.net(F.one_hot(states, 5).float()).gather(1, actions.unsqueeze(1))[:, 0]
        with torch.no_grad():
            best = self.target_net(F.one_hot(after, 5).float()).amax(1).masked_fill(is_over, 0.0)
        loss = F.mse_loss(values, rewards.float() + self.gamma * best)
        if batch_idx % self.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=0.03)


def main(callbacks, **options):
    L.seed_everything(8)
    train = DataLoader(ReplayStream(), batch_size=16)
    trainer = L.Trainer(max_epochs=4, limit_train_batches=30, callbacks=callbacks, **options)
    trainer.fit(DQN(), train)
    return trainer
