"""Start of a rank, before torch is imported: its environment, its command, and the record of its failures."""
