"""Client side of a federation: the local model, optimizers, and stores for client state between rounds."""
