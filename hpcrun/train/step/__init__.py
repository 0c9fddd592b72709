"""One optimizer step: precision, accumulation, clipping, the loss scale, the moving average."""
