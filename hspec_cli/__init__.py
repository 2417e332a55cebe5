"""The command line of hspec: parses, wires and prints. No model code."""

__version__ = "0.1.0"
