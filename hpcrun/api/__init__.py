"""Jobs from Python: submit a run, open a run, wait for its end. The command line is a layer over it."""
