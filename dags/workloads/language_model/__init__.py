"""The reference language model: small, byte-level, trained on text that every machine has."""
