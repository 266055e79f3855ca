"""Several processes per client: DDP inside a visit, for clients on other machines."""
