"""Tests that need a real CUDA device: `python3 build.py test -m gpu`."""
