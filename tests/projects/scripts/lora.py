"""Low-rank adapters for a language model, in the style of peft's examples."""

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel


class Countings(Dataset):
    def __init__(self, num_samples):
        starts = torch.arange(num_samples)[:, None]
        self.tokens = (starts + torch.arange(10) * (1 + starts % 2)) % 16

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class CausalLM(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = GPT2Config(
            vocab_size=16,
            n_positions=16,
            n_embd=32,
            n_layer=1,
            n_head=2,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=0,
        )
        adapters = LoraConfig(
            task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["c_attn", "c_fc"],
            fan_in_fan_out=True,
        )  # fmt: skip
        self.model = get_peft_model(GPT2LMHeadModel(config), adapters)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)

    def train_dataloader(self):
        return DataLoader(Countings(240), batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Countings(32), batch_size=16)


def main(callbacks, **options):
    L.seed_everything(1)
    model = CausalLM()
    trainer = L.Trainer(max_epochs=3, gradient_clip_val=1.0, callbacks=callbacks, **options)
    trainer.fit(model)
    return trainer
