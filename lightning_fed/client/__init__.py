"""Code for the client: the local model, the optimizers, and stores for client state."""
