"""HTML reports of fits and comparisons, and tables for a terminal."""
