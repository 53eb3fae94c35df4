"""Start Ray, or use the cluster that is there."""

from __future__ import annotations

import logging
import sys
from typing import Any

from tensortap.errors import HarvestError, needs


def start_ray() -> Any:
    """Return Ray, started on this machine where no cluster is in use."""
    with needs("tt.Ray(…)", "tensortap[harvest]"):
        import ray
        import ray.data
    if not ray.is_initialized():
        try:
            ray.init(include_dashboard=False, log_to_driver=False)
        except Exception as error:
            raise HarvestError(f"Ray cannot be started: {type(error).__name__}: {error}") from error
    if not sys.stderr.isatty():
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)  # it tells the beginning and end of every plan
    return ray
