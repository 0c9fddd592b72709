"""The commit protocol on a file system: files, manifests, locks, retention. Imports no torch."""
