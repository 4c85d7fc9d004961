"""Claims about the modules of the state store that need no Megatron."""
