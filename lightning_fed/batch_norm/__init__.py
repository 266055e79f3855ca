"""BatchNorm statistics: measurement on clients, pooling, and use for data from unknown clients."""
