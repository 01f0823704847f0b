"""A CUDA device on a machine without one: the host's memory and the CPU's kernels, seen as ``cuda:0``.

``make gpu-on-host`` builds it and runs the tests for a GPU on it. What they find is what a device changes:
tensors on the wrong one, generators that nobody saves, autograd's thread of the device, CUDA graphs whose
inputs lie elsewhere. Bits are those of the CPU; there is no NCCL, no Triton, and nothing is fast.
"""
