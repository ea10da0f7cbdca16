"""Tuning by gradient of what a quantized model stores: scales, offsets, codes, biases and norms."""
