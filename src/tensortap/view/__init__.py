"""Ways to look at a run. Importing this gives runs their looks: `_repr_html_` and `plot`."""

from tensortap.view.notebook import plot as plot
from tensortap.view.notebook import run as run
