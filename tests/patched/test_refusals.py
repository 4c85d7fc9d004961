"""What streaming refuses exists under that name: a renamed flag would be refused no more."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests import gpt, streaming
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


def refused_quantised_params(directory: str) -> str:
    """Return the error of a run of whole params that finds its matrices quantised."""
    from megatron.core.optimizer.nvme_state_store import float16_optimizer

    vars(float16_optimizer)["is_quantised"] = lambda param: param.dim() == 2
    try:
        gpt.train([*gpt.REPLICATED, *streaming.flags(directory)], until=0)
    except ValueError as error:
        return str(error)
    return ""


def test_quantised_whole_params_are_refused_before_any_file_is_made(
    ranks: RankPool, tmp_path: Path
) -> None:
    (error,) = ranks.run(refused_quantised_params, directory=str(tmp_path / "state"))

    assert "cannot be used with quantised params (here Parameter) but under" in error
    assert "leave out --fp8-param-gather" in error
    assert not (tmp_path / "state").exists()
