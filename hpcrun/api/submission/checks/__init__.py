"""Checks of a submission before anything is written: each finds what would end, train or report wrongly."""
