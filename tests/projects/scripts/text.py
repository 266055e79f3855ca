"""Text classification with transformers, in the style of Lightning's GLUE tutorial."""

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

COMMON = ["[PAD]", "[UNK]", "the", "a", "this", "film", "is", "was", "rather"]
GOOD, BAD = ["good", "great", "fine"], ["bad", "poor", "dull"]
WORDS = [*COMMON, *GOOD, *BAD]


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


class GLUEDataModule(L.LightningDataModule):
    def __init__(self, tokenizer, train_batch_size=8):
        super().__init__()
        self.tokenizer = tokenizer
        self.train_batch_size = train_batch_size

    def setup(self, stage):
        self.dataset = {"train": self.make(180, 0), "validation": self.make(45, 1)}

    def make(self, count, seed):
        """Tokenised sentences of different lengths with a good or a bad word, as mappings like in ``datasets``."""
        generator = torch.Generator().manual_seed(seed)
        features = []
        for index in range(count):
            length = int(torch.randint(3, 8, (), generator=generator))
            words = [WORDS[2 + int(torch.randint(7, (), generator=generator))] for _ in range(length)]
            label = index % 2
            words[index % length] = (GOOD, BAD)[label][index % 3]
            features.append({**self.tokenizer(" ".join(words), return_token_type_ids=False), "labels": label})
        return features

    def train_dataloader(self):
        collate = DataCollatorWithPadding(self.tokenizer)
        return DataLoader(self.dataset["train"], batch_size=self.train_batch_size, shuffle=True, collate_fn=collate)

    def val_dataloader(self):
        collate = DataCollatorWithPadding(self.tokenizer)
        return DataLoader(self.dataset["validation"], batch_size=32, collate_fn=collate)


class GLUETransformer(L.LightningModule):
    def __init__(self, config, learning_rate=1e-2, warmup_steps=5, weight_decay=0.01):
        super().__init__()
        self.save_hyperparameters(ignore="config")
        self.model = BertForSequenceClassification(config)
        self.outputs = []

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        outputs = self(**batch)
        loss = outputs[0]
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        val_loss, logits = self(**batch)[:2]
        self.outputs.append({"loss": val_loss, "preds": logits.argmax(1), "labels": batch["labels"]})

    def on_validation_epoch_end(self):
        preds = torch.cat([output["preds"] for output in self.outputs])
        labels = torch.cat([output["labels"] for output in self.outputs])
        self.log("val_loss", torch.stack([output["loss"] for output in self.outputs]).mean(), prog_bar=True)
        self.log("accuracy", (preds == labels).float().mean(), prog_bar=True)
        self.outputs.clear()

    def configure_optimizers(self):
        no_decay = ["bias", "LayerNorm.weight"]
        named = list(self.model.named_parameters())
        groups = [
            {
                "params": [p for n, p in named if not any(nd in n for nd in no_decay)],
                "weight_decay": self.hparams.weight_decay,
            },
            {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate)
        scheduler = get_linear_schedule_with_warmup(
            optimizer,
            num_warmup_steps=self.hparams.warmup_steps,
            num_training_steps=self.trainer.estimated_stepping_batches,
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


def main(callbacks, **options):
    L.seed_everything(42)
    dm = GLUEDataModule(make_tokenizer())
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    model = GLUETransformer(config)
    trainer = L.Trainer(max_epochs=3, callbacks=callbacks, **options)
    trainer.fit(model, datamodule=dm)
    return trainer
