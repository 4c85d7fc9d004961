"""Optimizer state (FP32 main params, moments) on node-local NVMe, streamed through the step.

Modules by rank; each imports only from the ranks above it, and only the adapters import Megatron:

    errors, formats             what can go wrong; what the bytes of a segment are
    system_calls, memory,       the seam to the kernel; where bytes lie in memory; what the page
    page_cache, filesystems     cache holds of a file; what is known of a kind of filesystem
    config, layout              knobs; entries -> buckets -> byte extents
    budgets, placement          how much memory the tiers may have; which bucket lives in which
    descriptors, pinned         a file past and through the page cache; host memory for the device
    state_file, rank_directory  one preallocated file; a private, locked directory for it
    io_request, direct_io       what an engine is asked for; whether direct I/O works somewhere
    io_engine                   reads and writes with tickets
    homes, staging              where buckets live between two steps; their slots on the device
    encoding, fingerprint,      formats to FP32 and back; has a shard changed; do all ranks agree
    agreement                   that nothing failed
    optimizer_state             what state a class keeps of a param, found by asking it
    bucket_optimizer            the update of one resident bucket by Megatron's own optimizer
    report, progress            what a step did; a line in the log while something takes minutes
    timeline, metrics           when each verb worked on each bucket; numbers for who plots them
    pipeline                    the order of a step: read, upload, update, publish, download, write
    working_set                 what moves the state of a store, made and given back together
    checkpoint                  durable snapshot and restore
    model_shards, resident      a bucket and the model's shards; params that do not stream
    casting                     a resident bucket in the formats of its layout
    bucket_work                 what is done to a bucket while it is resident
    store                       lifetime and state; the only class callers hold
    plan, probe                 tools around the store, without it; plan is a package, whose
                                docstring ranks its modules
    commands                    their command lines
    __main__                    `python -m ...`, or by its path

Beside them deferral, which imports none of them, and the adapters: quantised_params;
streamed_optimizer, on it distributed_optimizer, float16_optimizer and layer_wise_optimizer;
chained_optimizer; and what hooks call: checkpoint_hooks, arguments.

This file imports nothing, so that a hook of upstream's pays only for the module it names.
"""
