"""Tests. Without a GPU, Triton's interpreter runs the kernels: it must be asked before anybody imports triton."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
