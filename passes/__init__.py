"""A model becomes a plan, a plan becomes a program: one pass, one file."""
