"""The copy of the submitted code, and the state of its git work tree."""
