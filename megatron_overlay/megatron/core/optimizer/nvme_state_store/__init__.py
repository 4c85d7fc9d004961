"""Optimizer state (FP32 main params, moments) on node-local NVMe, streamed through the step.

Modules by rank; each imports only from the ranks above it, and only the adapters import Megatron:

    errors, config, layout     what can go wrong; knobs; entries -> buckets -> byte extents
    state_file, rank_directory one preallocated file; a private, locked directory for it
    io_engine, staging         reads and writes with tickets; host and device slots
    fingerprint, agreement     has a shard changed; do all ranks agree that nothing failed
    optimizer_state            what state a class keeps of a param, found by asking it
    bucket_optimizer           the update of one resident bucket by Megatron's own optimizer
    pipeline                   the order of a step: read, upload, update, publish, download, write
    checkpoint                 durable snapshot and restore
    model_shards, resident     a bucket and the model's shards; params that do not stream
    store                      lifetime and state; the only class callers hold
    adapters                   quantised_params; streamed_optimizer, on it distributed_optimizer,
                               float16_optimizer and layer_wise_optimizer; chained_optimizer;
                               what hooks call: checkpoint_hooks, arguments

This file imports nothing, so that a hook of upstream's pays only for the module it names.
"""
