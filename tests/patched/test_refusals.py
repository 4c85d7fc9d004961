"""What streaming refuses exists under that name: a renamed flag would be refused no more."""

from __future__ import annotations

import dataclasses

from tests import gpt
from tests.rank_pool import RankPool


def refused_but_unknown(planted: str) -> list[str]:
    """Return the names that a refusal looks for and upstream does not have; ``planted`` is one."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.nvme_state_store import arguments, config
    from megatron.training import get_args

    gpt.train(gpt.BF16, until=1)
    fields = {field.name for field in dataclasses.fields(OptimizerConfig)}
    parsed = set(vars(get_args()))
    return [
        *(name for name, _, _ in config._REFUSED if name not in fields),
        *(
            name
            for name in [
                *(planted, "fp8_param_gather", "fp8_recipe", "stream_ckpt_dequant"),
                *(row[0] for row in arguments._REFUSED),
            ]
            if name not in parsed
        ),
    ]


def test_every_refused_name_is_one_of_upstreams(ranks: RankPool) -> None:
    assert ranks.run(refused_but_unknown, planted="a_renamed_flag") == [["a_renamed_flag"]]
