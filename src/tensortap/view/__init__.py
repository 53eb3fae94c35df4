"""Show runs: on the terminal, in a notebook, in the browser, as one HTML file.

Importing it gives `Run` its `_repr_html_` and `plot`. Reads `store`, `diagnose` and `diff`; never imports `watch` or
an adapter.
"""

from tensortap.view.notebook import plot as plot
from tensortap.view.notebook import run as run
