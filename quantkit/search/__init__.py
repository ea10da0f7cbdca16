"""The search for the best (q, g) of every layer within a budget."""
