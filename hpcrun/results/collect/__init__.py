"""Collection of many runs into one HDF5 file."""
