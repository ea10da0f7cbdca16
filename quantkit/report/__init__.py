"""Reports to look at: one self-contained HTML file with figures and tables."""
