"""FoX whose gates start almost open: f = sigmoid(5) = 0.993 in place of 0.5.

So a token is half forgotten after 103 others, and not after one: data-dependent ALiBi, as in the
package x-transformers.

    python train.py --entry=examples/schemes/fox_open.py config/debug.toml
"""

from model import FoX


class FoXOpen(FoX):
    """Forget gates with a bias of 5 at first."""

    first_bias = 5.0
