"""HTML reports for fits and comparisons, and tables for a terminal."""
