"""The model of a federation: its entries, their widths, its features, its BatchNorm layers."""
