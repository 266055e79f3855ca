"""Commands for the program ``lightning-fed``."""
