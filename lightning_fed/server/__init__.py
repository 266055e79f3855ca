"""Server side: client selection, averaging, message checks and byte counts."""
