"""LoRA fine-tuning of a text classifier: transformers and peft in Lightning, with a model from a local folder."""

import argparse
from pathlib import Path

import lightning as L
import lightning_fed as fed
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

TOPICS = {
    "kitchen": "pan oven butter knife salt flour soup plate",
    "weather": "rain wind cloud snow storm sun frost fog",
    "garden": "seed spade rose soil fence hedge bulb weed",
}
COMMON = "the a this that has is near under with after some my old new red big"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *COMMON.split(), *" ".join(TOPICS.values()).split()]


def make_folder(folder: Path):
    """Writes a small untrained BERT in place of a downloaded model."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=64, num_labels=len(TOPICS),
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)


def make_texts(count: int, seed: int):
    """Sentences with common words and two words from a topic, and the topics as labels."""
    generator = torch.Generator().manual_seed(seed)

    def draw(words):
        return words[int(torch.randint(len(words), (), generator=generator))]

    examples = []
    for _ in range(count):
        topic = int(torch.randint(len(TOPICS), (), generator=generator))
        words = [draw(COMMON.split()) for _ in range(6)]
        for _ in range(2):
            words[int(torch.randint(6, (), generator=generator))] = draw([*TOPICS.values()][topic].split())
        examples.append((" ".join(words), topic))
    return examples


class Collate:
    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def __call__(self, examples):
        texts, labels = zip(*examples, strict=True)
        tokens = self.tokenizer(list(texts), padding=True, return_tensors="pt")
        names = ("input_ids", "attention_mask")
        return {**{name: tokens[name] for name in names}, "labels": torch.tensor(labels)}


class LoraClassifier(L.LightningModule):
    def __init__(self, folder: str, num_labels: int = 3, rank: int = 8, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=num_labels, local_files_only=True)
        adapters = LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, target_modules=["query", "value"])
        self.model = get_peft_model(model, adapters).train()
        self.accuracy = MulticlassAccuracy(num_labels, average="micro")

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.accuracy.update(output.logits, batch["labels"])
        self.log("val_loss", output.loss, prog_bar=True)
        self.log("val_acc", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--texts", type=int, default=600)
    parser.add_argument("--folder", type=Path, default=Path("tiny-bert"), help="of a model; made if it is not there")
    args = parser.parse_args()

    L.seed_everything(1)
    if not args.folder.exists():
        make_folder(args.folder)
    collate = Collate(args.folder)
    train = DataLoader(make_texts(args.texts, seed=1), batch_size=16, shuffle=True, collate_fn=collate)
    val = DataLoader(make_texts(args.texts // 3, seed=2), batch_size=64, collate_fn=collate)
    best = ModelCheckpoint(monitor="val_acc", mode="max")
    trainer = fed.FederatedTrainer(
        partition=fed.data.Dirichlet(num_clients=6, alpha=1.0),
        max_epochs=args.epochs,
        callbacks=[best],
    )
    trainer.fit(LoraClassifier(str(args.folder)), train, val)
    print(f"best validation accuracy: {best.best_model_score:.3f}")


if __name__ == "__main__":
    main()
