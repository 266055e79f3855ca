"""A model as the federation sees it: its entries, their widths, its features, its BatchNorm layers."""
