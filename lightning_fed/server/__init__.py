"""Server side: client selection, message checks and byte counts."""
