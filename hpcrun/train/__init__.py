"""From a batch to a weight update: data order, precision, parallelism, the loop."""
