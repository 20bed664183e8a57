"""The operators that the model calls: rope(), attention(), linear_cross_entropy().

Each has one signature, stated in reference.py, and this file is the only one that knows on which device which
implementation runs. Every operator runs on the plain PyTorch reference, on every device.
Importing this package prints nothing and imports nothing but torch.
"""
from .reference import attention, linear_cross_entropy, rope

__all__ = ["rope", "attention", "linear_cross_entropy"]
