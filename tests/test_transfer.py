"""Numbers go to the device together and arrive as they were."""

from __future__ import annotations

import numpy as np
import torch

from faircopy.kernels.transfer import ALIGNED, parts_of, sent_together

ARRAYS = (np.arange(5, dtype=np.int32), np.zeros((0, 3), np.int32), np.arange(6).reshape(2, 3), np.array([7], np.int32))


def test_parts_of_one_block_do_not_overlap() -> None:
    block = torch.zeros(256, dtype=torch.uint8)
    parts = parts_of(block, ARRAYS)
    for part, array in zip(parts, ARRAYS, strict=True):
        part.numpy()[...] = array
    for part, array in zip(parts, ARRAYS, strict=True):
        assert part.is_contiguous() and part.numpy().dtype == array.dtype and np.array_equal(part.numpy(), array)
        assert (part.data_ptr() - block.data_ptr()) % ALIGNED == 0 or not part.numel()


def test_arrays_arrive_as_they_were() -> None:
    for tensor, array in zip(sent_together(*ARRAYS, device=torch.device("cpu")), ARRAYS, strict=True):
        assert tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), array)
