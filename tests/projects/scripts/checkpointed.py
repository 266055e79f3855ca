"""A transformer with checkpointed blocks and a tied output layer."""

import lightning as L
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, mask):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class LanguageModel(L.LightningModule):
    def __init__(self, num_tokens=11, width=16, length=12):
        super().__init__()
        self.tokens, self.places = nn.Embedding(num_tokens, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, num_tokens, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.triu(torch.ones(length, length, dtype=torch.bool), 1), persistent=False)
        apply_activation_checkpointing(self, checkpoint_wrapper, check_fn=lambda layer: isinstance(layer, Block))

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places[:length]
        for block in self.blocks:
            x = block(x, self.mask[:length, :length])
        return self.head(x)

    def step(self, batch):
        (tokens,) = batch
        return F.cross_entropy(self(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])

    def training_step(self, batch, batch_idx):
        return self.step(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self):
        matrices = [value for value in self.parameters() if value.ndim > 1]
        vectors = [value for value in self.parameters() if value.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.005)


def sequences(count):
    starts, steps = torch.randint(11, (count, 1)), torch.randint(1, 3, (count, 1))
    return TensorDataset((starts + steps * torch.arange(12)) % 11)


def main(callbacks, **options):
    L.seed_everything(16)
    train, val = DataLoader(sequences(90), 10, shuffle=True), DataLoader(sequences(30), 10)
    trainer = L.Trainer(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(LanguageModel(), train, val)
    return trainer
