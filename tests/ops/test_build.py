"""The reference set as a whole."""

from __future__ import annotations

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import OP_NAMES, WHOLES, build


@pytest.mark.parametrize("precision", ["exact", "float32", "fast"])
def test_the_reference_has_every_op_with_the_table_s_signature(precision):
    functions = reference_ops(precision)
    assert set(functions) == set(OP_NAMES) - set(WHOLES)
    origin = build({"reference": functions}).origin
    assert {name for name in OP_NAMES if origin[name] == "composed"} == set(WHOLES)
    assert set(origin.values()) == {"reference", "composed"}


def test_a_backend_s_whole_layers_give_way_when_one_of_its_ops_is_swapped():
    reference = reference_ops("fast")

    def prepare_layers(layers):
        return layers

    def run_layers(state, inputs, layers):
        return state

    whole = reference | {"prepare_layers": prepare_layers, "run_layers": run_layers}
    assert build({"fused": whole}).run_layers is run_layers
    assert build({"reference": reference, "fused": whole}).run_layers is run_layers
    swapped = build({"fused": whole, "other": {"hyper_leave": reference["hyper_leave"]}})
    assert (swapped.origin["hyper_leave"], swapped.origin["run_layers"]) == ("other", "composed")


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="fp16"):
        reference_ops("fp16")


def test_importing_the_reference_leaves_torch_s_settings_alone():
    import subprocess
    import sys

    code = (
        "import torch; before = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads());"
        "import deepinfer.ops.reference.build;"
        "assert before == (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads())"
    )
    assert subprocess.run([sys.executable, "-c", code], env=_environment(), check=False).returncode == 0
    assert torch.get_default_dtype() == torch.float32


def _environment() -> dict[str, str]:
    import os
    import sys

    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
