"""The rounds: where the server half and the client half meet Lightning."""
