"""What if: the broker's own core on a virtual clock, beside simpler ways to share the same GPUs.

Pure: it imports the broker's core and nothing else of the project, reads no clock and knows no chance. The
commands around it are in `what_if`.
"""
