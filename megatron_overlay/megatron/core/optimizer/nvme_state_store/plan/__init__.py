"""Plans of bytes, time and flags, before anything is bought or started.

Modules by rank; each imports only from the ranks above it, and of the store what a plan must not
compute in another way: layouts, formats, placement, budgets.

    architecture, machine,      the sizes of a model; a node; what paths carry, also from a probe's
    rates                       report
    megatron_names              which arguments Megatron has
    megatron_words, hf          Megatron's arguments by name; sizes in a config.json
    megatron, model             sizes in Megatron's arguments; params by kind
    ranks                       what a rank has of a model, and of its optimizer's state
    splits, memory              what ranks cannot be given; bytes of a rank, wherever they are
    step_time                   how long a step takes, and what it wears off the disks
    choices                     formats and tiers side by side; the best that fits, and its flags
    advice, figure              what would make it fit if nothing does; a plan as a picture
    text, arguments             a plan as a table and as JSON; the command line
    command                     from the command line to the output

This file imports nothing.
"""
