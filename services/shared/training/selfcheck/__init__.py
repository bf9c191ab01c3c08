"""Checks of torch, its kernels and its collectives on this machine, for `stillhouse doctor`."""
