"""The copy of the code that a run was submitted from, and what git says about it."""
