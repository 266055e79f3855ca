"""BatchNorm statistics: measurement on clients, pooling, and data without a client."""
