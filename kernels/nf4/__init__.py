"""Weights that are not trained, in four bits a number. See `reference.py` for the arithmetic.

payload_B = encode(x_N)                  # uint8, payload_bytes(x_N.numel()) of them
x_N = decode(payload_B, x_N.numel())
"""

from shoal.kernels.nf4.reference import decode, encode, payload_bytes

__all__ = ["decode", "encode", "payload_bytes"]
