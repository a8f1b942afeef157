"""A value as bytes: pickles, out-of-band buffers, tensors."""
