"""The census finds whoever touches main params or optimizer state, and what counts of it."""

from __future__ import annotations

import pytest

from buildtools.census import Reader, readers
from buildtools.console import BuildError
from buildtools.evidence import evidence_of_reader
from buildtools.symbols import Sources


def census(body: str, signature: str = "def reader(self, optimizer, param):") -> dict[str, Reader]:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return readers(Sources({"a.py": f"{signature}\n{lines}".encode()}))


@pytest.mark.parametrize(
    ("body", "touches"),
    [
        ("return param.main_param.norm()", "main_param"),
        ("return getattr(param, 'main_param', None)", "'main_param'"),
        ("return optimizer.state[param]", "optimizer.state"),
        ("return self.optimizer.state[param]['exp_avg']", "'exp_avg'"),
        ("for g in self.param_groups: print(g['params'])", "param_groups"),
        ("for p in self.get_parameters(): p.zero_()", "get_parameters()"),
        ("return self.shard_fp32_from_float16_groups[0]", "shard_fp32_from_float16_groups"),
        ("def inner():\n    return param.main_param\nreturn inner()", "main_param"),
        ("return [f(p) for g in self.fp32_from_float16_groups for p in g]", "fp32_from"),
        ("main_param, = self.rest\nreturn main_param", "main_param"),
        ("for o in chained.chained_optimizers:\n    o.opt.state.clear()", "optimizer.state"),
        ("return get_optimizer().state", "optimizer.state"),
        ("return getattr(dist_opt, 'state')", "optimizer.state"),
        ("return store(main_param=param)", "main_param"),
        ("self.get_unscaled_state(param, 'master_param')", "'master_param'"),
        ("self._copy_main_params_to_model_params()", "_copy_main_params_to_model_params()"),
        ("return ChainedOptimizer([])", "ChainedOptimizer()"),
        ("return optim.DistributedOptimizer(param)", "DistributedOptimizer()"),
        ("DistributedOptimizer.load_state_dict = param", "DistributedOptimizer.load_state_dict ="),
        ("setattr(ChainedOptimizer, 'step', param)", "setattr(ChainedOptimizer)"),
    ],
)
def test_a_reader_is_found(body: str, touches: str) -> None:
    found = census(body)

    assert list(found) == ["a.py::reader"]
    assert any(each.startswith(touches) for each in found["a.py::reader"].touches)


@pytest.mark.parametrize("body", ["return param.main_grad", "return self.state", "return params"])
def test_others_are_not(body: str) -> None:
    assert census(body) == {}


def test_self_is_an_optimizer_where_optimizers_are() -> None:
    text = b"class A:\n    def wipe(self):\n        self.state.clear()\n"

    assert set(readers(Sources({"m/optimizer/a.py": text, "m/b.py": text}))) == {
        "m/optimizer/a.py::A.wipe"
    }


def test_class_bodies_and_modules_count_too() -> None:
    text = b"NAMES = ['exp_avg']\nclass A:\n    groups = property(lambda s: s.param_groups)\n"

    assert set(readers(Sources({"a.py": text}))) == {"a.py::", "a.py::A"}


BODY = """\
unrelated(1)
if self.is_stub:
    return None
for group in optimizer.param_groups:
    params = group['params']
    if group['lr'] > 0:
        kept.append(params)
log(2)
for each in kept:
    each.zero_()
"""


def _print(body: str) -> str:
    return evidence_of_reader(census(body)["a.py::reader"]).fingerprint


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("each.zero_()", "each.add_(1)"),
        ("kept.append(params)", "kept.append(params[1:])"),
        ("if group['lr'] > 0:", "if True:"),
        ("if self.is_stub:\n    return None\n", ""),
        ("for each in kept:\n    each.zero_()\n", ""),
        ("return None", "pass"),
    ],
)
def test_a_reader_changes_with_whatever_handles_the_tensors(old: str, new: str) -> None:
    """Also through variables and containers, and with the conditions and exits around it."""
    assert old in BODY
    assert _print(BODY.replace(old, new)) != _print(BODY)


NESTED = """\
def fill(one, two):
    for each in one:
        each.grad = two

def pick():
    return optimizer.param_groups

fill(self.shard_fp32_groups, 1)
for group in pick():
    log(group)
self.kept = param.main_param
self.kept.zero_()
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        each.grad = two\n", "        each.grad = two\n        each.data.zero_()\n"),
        ("    log(group)", "    group.clear()"),
        ("self.kept.zero_()", "self.kept.fill_(1)"),
    ],
)
def test_tensors_are_followed_through_nested_functions_and_attributes(old: str, new: str) -> None:
    assert old in NESTED
    assert _print(NESTED.replace(old, new)) != _print(NESTED)


@pytest.mark.parametrize(
    "signature",
    [
        "@cached\ndef reader(self, optimizer, param):",
        "def reader(self, optimizer, param, more):",
        "def reader(self, optimizer, param=None):",
    ],
)
def test_how_a_reader_is_called_is_part_of_it(signature: str) -> None:
    found = census("return param.main_param", signature)["a.py::reader"]

    assert evidence_of_reader(found).fingerprint != _print("return param.main_param")


@pytest.mark.parametrize(("old", "new"), [("unrelated(1)", "other(1)"), ("log(2)\n", "")])
def test_a_reader_does_not_change_with_the_rest_of_its_function(old: str, new: str) -> None:
    assert _print(BODY.replace(old, new)) == _print(BODY)


def test_a_file_that_cannot_be_parsed_is_not_passed_over() -> None:
    with pytest.raises(BuildError, match=r"a\.py is not Python 3"):
        readers(Sources({"a.py": b"def (param.main_param\n"}))
