"""Server side: client schedule, averaging, message checks and byte counts."""
