"""Words of the user's command: its program, its script, its launcher. Checks and ranks read them."""
