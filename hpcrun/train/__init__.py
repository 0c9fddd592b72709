"""Training of a rank: data order, precision, parallelism, the loop."""
