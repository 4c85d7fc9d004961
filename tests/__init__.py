"""Tests of the build tools, of the store, and of the patched Megatron."""
