"""Ways to look at a run. Importing this gives runs their looks: `_repr_html_` and `plot`."""

from tensortap.view import notebook as notebook
from tensortap.view import plot as plot
