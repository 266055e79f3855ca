"""LoRA for a text classifier: the transformers model comes from a folder, the text from a datasets table."""

import tempfile

import lightning as L
import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

COMMON, GOOD, BAD = range(8), (8, 9, 10), (11, 12, 13)


def make_table(count):
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(len(COMMON), (count, 8), generator=generator)
    labels = torch.arange(count) % 2
    rows[:, 3] = torch.where(labels == 1, GOOD[0], BAD[0]) + torch.randint(3, (count,), generator=generator)
    reviewers = [f"reviewer {number // 2 % 4}" for number in range(count)]
    return Dataset.from_dict({"input_ids": rows.tolist(), "label": labels.tolist(), "reviewer": reviewers})


class Classifier(L.LightningModule):
    def __init__(self, folder):
        super().__init__()
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, local_files_only=True)
        adapters = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, target_modules=["query", "value"])
        self.model = get_peft_model(model, adapters).train()

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch["input_ids"], labels=batch["label"]).loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(input_ids=batch["input_ids"], labels=batch["label"]).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


def main(callbacks, **options):
    L.seed_everything(1)
    folder = tempfile.mkdtemp()
    config = BertConfig(
        vocab_size=14, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, initializer_range=0.2,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    train = DataLoader(make_table(200).with_format("torch"), batch_size=10, shuffle=True)
    val = DataLoader(make_table(50).with_format("torch"), batch_size=25)
    trainer = L.Trainer(max_epochs=3, callbacks=callbacks, **options)
    trainer.fit(Classifier(folder), train, val)
    return trainer
