"""The commands behind the Makefile: install, run the stack, the demo. Not part of the distribution."""
