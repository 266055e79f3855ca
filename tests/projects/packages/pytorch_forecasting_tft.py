"""Demand forecasting with a temporal fusion transformer, as in pytorch-forecasting's tutorial."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from pytorch_forecasting import GroupNormalizer, QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet


def make_data():
    generator = np.random.default_rng(0)
    time = np.arange(60)
    series = [
        pd.DataFrame({
            "time_idx": time, "agency": f"agency_{agency:02}", "month": (time % 12).astype(str),
            "volume": 10 + 3 * np.sin(time / 2 + agency) + 0.2 * generator.standard_normal(60),
        })
        for agency in range(6)
    ]  # fmt: skip
    return pd.concat(series, ignore_index=True).assign(month=lambda data: data.month.astype("category"))


def main(callbacks, **options):
    pl.seed_everything(42)
    data = make_data()
    training = TimeSeriesDataSet(
        data[lambda x: x.time_idx <= 52], time_idx="time_idx", target="volume", group_ids=["agency"],
        min_encoder_length=6, max_encoder_length=12, min_prediction_length=1, max_prediction_length=4,
        static_categoricals=["agency"], time_varying_known_categoricals=["month"],
        time_varying_known_reals=["time_idx"],
        time_varying_unknown_reals=["volume"], target_normalizer=GroupNormalizer(groups=["agency"]),
        add_relative_time_idx=True, add_target_scales=True, add_encoder_length=True,
    )  # fmt: skip
    validation = TimeSeriesDataSet.from_dataset(training, data, predict=True, stop_randomization=True)
    train_dataloader = training.to_dataloader(train=True, batch_size=32, num_workers=0)
    val_dataloader = validation.to_dataloader(train=False, batch_size=32, num_workers=0)
    tft = TemporalFusionTransformer.from_dataset(
        training, learning_rate=0.03, hidden_size=8, attention_head_size=1, dropout=0.1, hidden_continuous_size=4,
        loss=QuantileLoss(), optimizer="adam", reduce_on_plateau_patience=4,
    )  # fmt: skip
    trainer = pl.Trainer(max_epochs=2, gradient_clip_val=0.1, callbacks=callbacks, **options)
    trainer.fit(tft, train_dataloaders=train_dataloader, val_dataloaders=val_dataloader)
    return trainer
