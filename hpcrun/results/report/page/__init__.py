"""The report as one HTML file without scripts and without the network."""
