"""The papers' equations on tensors; nothing here knows Lightning or the rest of the package."""
