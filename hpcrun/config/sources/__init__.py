"""Sources of config values: files, the site's profile, flags and overrides."""
