"""The trainer's own code at full size and full world size, on devices that are said to be there (docs/rehearsal.md)."""
