"""One save or restore by all ranks: who writes what, the copy to host memory, the files of each rank."""
