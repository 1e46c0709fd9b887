"""Plain PyTorch in place of SGLang's CUDA and Triton kernels, one topic a module."""
