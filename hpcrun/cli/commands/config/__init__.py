"""Commands that read a config before its run starts."""
