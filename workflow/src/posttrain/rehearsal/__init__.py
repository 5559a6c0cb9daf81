"""The trainer's own code at full size and full world size, on CUDA devices that are said to be there (docs/rehearsal.md)."""
