"""Several processes per client: remote clients can train visits with DDP."""
