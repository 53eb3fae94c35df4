"""Run the kernel on PyTorch's own OpenMP threads.

Between two operations PyTorch's workers spin on their cores, waiting for work. Other threads would compete with them;
the same workers, reached through the OpenMP library that PyTorch has loaded, start at once.
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


class SharedThreads:
    """Keep the kernel at as many threads as PyTorch uses, which a program may change at any time."""

    def __init__(self) -> None:
        self._count = 0

    def update(self) -> None:
        """Follow a change of `torch.get_num_threads()`; called once a step."""
        threads = torch.get_num_threads()
        if threads != self._count:
            self._count = threads
            # OpenMP would restart a team of another size than PyTorch's for every operation.
            kernels.borrow(
                _gomp_parallel() if threads <= kernels.MOST_THREADS else 0, min(threads, kernels.MOST_THREADS)
            )


@cache
def _gomp_parallel() -> int:
    """Return the address of GOMP_parallel in the library that PyTorch has loaded; 0 where it uses other threads."""
    folder = Path(torch.__file__).parent
    for path in sorted([*(folder / "lib").glob(_LIBRARIES), *folder.with_name("torch.libs").glob(_LIBRARIES)]):
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
        except (AttributeError, OSError):  # no such function, or not loaded
            continue
    return 0
