"""The kinds of faults that a network check finds in its measurements, each as pure functions."""
