"""Triton kernels, each beside its torch twin; imported only where there is a GPU, or an interpreter to test with."""
