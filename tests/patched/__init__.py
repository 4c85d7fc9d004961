"""Tests that run the assembled Megatron on ranks of an emulated CUDA device."""
