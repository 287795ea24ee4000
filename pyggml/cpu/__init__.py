"""The CPU machine room: SIMD intrinsics, the kernel compiler and its cache, the tape and the thread team."""
