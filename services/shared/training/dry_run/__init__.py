"""One training step at full size on fake tensors, with its memory counted."""
