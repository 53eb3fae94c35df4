"""PyTorch's own threads, lent to the kernel.

Between two operations PyTorch's workers spin on their cores for more work. Threads of ours would only stand in their
way; the same workers, asked through the OpenMP library that PyTorch has loaded, are there at once.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Final

import torch

from tensortap.reduce import kernel as kernels

_LIBRARIES: Final = "lib*omp*.so*"


class Lending:
    """Keeps the kernel at as many threads as PyTorch uses, which a program may change at any time."""

    def __init__(self) -> None:
        self._lent = 0

    def adjust(self) -> None:
        """Once a step."""
        threads = torch.get_num_threads()
        if threads != self._lent:
            self._lent = threads
            # A team of another size than PyTorch's own would be made anew for every operation.
            kernels.borrow(_parallel() if threads <= kernels.MOST_THREADS else 0, min(threads, kernels.MOST_THREADS))


@cache
def _parallel() -> int:
    """The address of GOMP_parallel in the library that PyTorch has loaded; 0 where it uses another kind of threads."""
    folder = Path(torch.__file__).parent
    for path in sorted([*(folder / "lib").glob(_LIBRARIES), *folder.with_name("torch.libs").glob(_LIBRARIES)]):
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
        except (AttributeError, OSError):  # no such function, or not loaded
            continue
    return 0
