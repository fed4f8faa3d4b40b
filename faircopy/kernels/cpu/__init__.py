"""CPU kernels, compiled when they are first used: LLVM comes with llvmlite, so no compiler is needed."""
