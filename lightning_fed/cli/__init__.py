"""Commands of the program ``lightning-fed``."""
