"""The journal of a run: one class for each kind of event, the file, and the state that follows."""
