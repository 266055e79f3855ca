"""Tools for models: entries (parameters and buffers), layer widths, features and BatchNorm layers."""
