"""The report of a bench: one page that needs nothing else, with a table behind every plot."""
