"""Records what Slurm's programs print, as the test data of hpcrun's parsers."""
