"""A save or restore by all ranks: write plan, copy to host memory, and the file of each rank."""
