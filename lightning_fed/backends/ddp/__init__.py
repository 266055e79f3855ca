"""DDP on a client: several processes of a remote client train together on the client's data."""
