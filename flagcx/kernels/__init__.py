"""CUDA kernels: their source, what one launch of them does, and their compilation at run time."""
